PRAGMA application_id=1146112323;
BEGIN TRANSACTION;
CREATE TABLE dpicl_acts (
	id INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	reason TEXT NOT NULL, 
	announced VARCHAR(40) NOT NULL, 
	generation INTEGER, 
	carried_out VARCHAR(40), 
	"before" TEXT, 
	"after" TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE dpicl_charges (
	counter_id INTEGER NOT NULL, 
	number BIGINT NOT NULL, 
	charged VARCHAR(40) NOT NULL, 
	units BIGINT DEFAULT '1' NOT NULL, 
	outcome VARCHAR(255), 
	receipt TEXT, 
	answer TEXT, 
	PRIMARY KEY (counter_id, number)
)
 WITHOUT ROWID

;
INSERT INTO "dpicl_charges" VALUES(1,1,'2026-11-22T19:21:30.100987+00:00',1,'released','{"id": "reviews:2025:vote:1", "budget": "reviews:2025", "plan": "b23be945bafcd905", "line": "vote", "number": 1, "principal": null, "assumption": "all callers may collude: the guarantee holds for all releases together", "mechanism": "the winner of the counts of every label plus discrete Gaussian noise of sigma 1.90259 each", "epsilon_spent": 1.4107921224660858, "epsilon": 3.0, "delta": 1e-05, "remaining": 9, "tokens": null, "outcome": "released", "replayed": false, "query": "2b3578810b9f8f3ddc0ab440e2e3c1f18d8277749812abc25e114e8e19438032", "time": "2026-11-22T19:21:30.100987+00:00"}','"Positive"');
INSERT INTO "dpicl_charges" VALUES(1,2,'2026-11-22T19:21:30.100987+00:00',1,'released','{"id": "reviews:2025:vote:2", "budget": "reviews:2025", "plan": "b23be945bafcd905", "line": "vote", "number": 2, "principal": null, "assumption": "all callers may collude: the guarantee holds for all releases together", "mechanism": "the winner of the counts of every label plus discrete Gaussian noise of sigma 1.90259 each", "epsilon_spent": 1.7145694199691375, "epsilon": 3.0, "delta": 1e-05, "remaining": 8, "tokens": null, "outcome": "released", "replayed": false, "query": "be11924605da3ce15b580f7c007c8d5483417d0da369176a84ffdc2fef88ddb8", "time": "2026-11-22T19:21:30.100987+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(1,3,'2026-11-22T19:21:30.100987+00:00',1,NULL,NULL,NULL);
INSERT INTO "dpicl_charges" VALUES(3,1,'2026-11-22T19:21:35.484765+00:00',1,'released','{"id": "callers:joint-em:3.1", "budget": "callers", "plan": "e47cff8e83809856", "line": "joint-em", "number": 1, "principal": "ann", "assumption": "callers do not collude: the guarantee holds for each principal''s releases on their own", "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 0.568303139772361, "epsilon": 2.0, "delta": 1e-06, "remaining": 4, "tokens": null, "outcome": "released", "replayed": false, "query": null, "time": "2026-11-22T19:21:35.484765+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(3,2,'2026-11-22T19:21:35.484765+00:00',1,'released','{"id": "callers:joint-em:3.2", "budget": "callers", "plan": "e47cff8e83809856", "line": "joint-em", "number": 2, "principal": "ann", "assumption": "callers do not collude: the guarantee holds for each principal''s releases on their own", "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 1.0945253610392005, "epsilon": 2.0, "delta": 1e-06, "remaining": 3, "tokens": null, "outcome": "released", "replayed": false, "query": null, "time": "2026-11-22T19:21:35.484765+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(3,3,'2026-11-22T19:21:35.484765+00:00',1,'released','{"id": "callers:joint-em:3.3", "budget": "callers", "plan": "e47cff8e83809856", "line": "joint-em", "number": 3, "principal": "ann", "assumption": "callers do not collude: the guarantee holds for each principal''s releases on their own", "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 1.510457877938154, "epsilon": 2.0, "delta": 1e-06, "remaining": 2, "tokens": null, "outcome": "released", "replayed": false, "query": null, "time": "2026-11-22T19:21:35.484765+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(3,4,'2026-11-22T19:21:35.484765+00:00',1,'released','{"id": "callers:joint-em:3.4", "budget": "callers", "plan": "e47cff8e83809856", "line": "joint-em", "number": 4, "principal": "ann", "assumption": "callers do not collude: the guarantee holds for each principal''s releases on their own", "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 1.7959107707204502, "epsilon": 2.0, "delta": 1e-06, "remaining": 1, "tokens": null, "outcome": "released", "replayed": false, "query": null, "time": "2026-11-22T19:21:35.484765+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(3,5,'2026-11-22T19:21:35.484765+00:00',1,'released','{"id": "callers:joint-em:3.5", "budget": "callers", "plan": "e47cff8e83809856", "line": "joint-em", "number": 5, "principal": "ann", "assumption": "callers do not collude: the guarantee holds for each principal''s releases on their own", "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 2.0, "epsilon": 2.0, "delta": 1e-06, "remaining": 0, "tokens": null, "outcome": "released", "replayed": false, "query": null, "time": "2026-11-22T19:21:35.484765+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(4,1,'2026-11-22T19:21:36.457148+00:00',1,'released','{"id": "callers:joint-em:4.1", "budget": "callers", "plan": "e47cff8e83809856", "line": "joint-em", "number": 1, "principal": "bob", "assumption": "callers do not collude: the guarantee holds for each principal''s releases on their own", "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 0.568303139772361, "epsilon": 2.0, "delta": 1e-06, "remaining": 4, "tokens": null, "outcome": "released", "replayed": false, "query": null, "time": "2026-11-22T19:21:36.457148+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(4,2,'2026-11-22T19:21:36.457148+00:00',1,'released','{"id": "callers:joint-em:4.2", "budget": "callers", "plan": "e47cff8e83809856", "line": "joint-em", "number": 2, "principal": "bob", "assumption": "callers do not collude: the guarantee holds for each principal''s releases on their own", "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 1.0945253610392005, "epsilon": 2.0, "delta": 1e-06, "remaining": 3, "tokens": null, "outcome": "released", "replayed": false, "query": null, "time": "2026-11-22T19:21:36.457148+00:00"}',NULL);
INSERT INTO "dpicl_charges" VALUES(5,1,'2026-11-22T19:21:36.771686+00:00',1,NULL,NULL,NULL);
INSERT INTO "dpicl_charges" VALUES(5,2,'2026-11-22T19:21:36.771686+00:00',1,NULL,NULL,NULL);
CREATE TABLE dpicl_counters (
	id INTEGER NOT NULL, 
	plan_id INTEGER NOT NULL, 
	line VARCHAR(255) NOT NULL, 
	principal VARCHAR(255) DEFAULT '' NOT NULL, 
	allowed BIGINT NOT NULL, 
	spent BIGINT NOT NULL, 
	returned BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT dpicl_one_counter UNIQUE (plan_id, line, principal), 
	CONSTRAINT dpicl_never_over_spent CHECK (returned >= 0 AND returned <= spent AND spent - returned <= allowed), 
	FOREIGN KEY(plan_id) REFERENCES dpicl_plans (id)
);
INSERT INTO "dpicl_counters" VALUES(1,1,'vote','',10,3,0);
INSERT INTO "dpicl_counters" VALUES(2,2,'joint-em','',5,0,0);
INSERT INTO "dpicl_counters" VALUES(3,2,'joint-em','ann',5,5,0);
INSERT INTO "dpicl_counters" VALUES(4,2,'joint-em','bob',5,2,0);
INSERT INTO "dpicl_counters" VALUES(5,3,'vote','',4611686018427387904,2,0);
CREATE TABLE dpicl_filters (
	plan_id INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	PRIMARY KEY (plan_id), 
	FOREIGN KEY(plan_id) REFERENCES dpicl_plans (id)
);
INSERT INTO "dpicl_filters" VALUES(3,'{"spent": ["0x1.7a49a05af3996p-3"], "failed": "0x0.0p+0"}');
CREATE TABLE dpicl_meta (
	"key" VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "dpicl_meta" VALUES('schema_version','2');
INSERT INTO "dpicl_meta" VALUES('query_key','e4e9ef813c5547d436e84ba4557126941e0dd74c44038f49fdfbff5b614bf9ed');
INSERT INTO "dpicl_meta" VALUES('fingerprint_key','b4bb18a80a7e2749bd7cc50559ac874d182a7bff2dafe59f73082f8807200ae9');
CREATE TABLE dpicl_plans (
	id INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	content TEXT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	created VARCHAR(40) NOT NULL, 
	scope VARCHAR(20) DEFAULT 'shared' NOT NULL, 
	fingerprint TEXT, 
	generation INTEGER DEFAULT '1' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "dpicl_plans" VALUES(1,'reviews:2025','{"delta": 1e-05, "epsilon": 3.0, "format": 1, "lines": {"vote": {"count": 10, "mechanism": "vote", "options": {}, "parameter": 1.90259, "rate": 0.2, "weight": 1.0}}}','b23be945bafcd90579f82ea74fc8d19425c2dae28d0a8352645a3b382a8b5f97','2026-11-22T19:21:29.880711+00:00','shared',NULL,1);
INSERT INTO "dpicl_plans" VALUES(2,'callers','{"delta": 1e-06, "epsilon": 2.0, "format": 1, "lines": {"joint-em": {"count": 5, "mechanism": "joint-em", "options": {}, "parameter": 2.16349, "rate": 0.1, "weight": 1.0}}}','e47cff8e83809856b110cd693e00157deaab8701006799ae8568afd37dd9cbc4','2026-11-22T19:21:34.376331+00:00','per_principal',NULL,1);
INSERT INTO "dpicl_plans" VALUES(3,'filter','{"delta": 1e-05, "epsilon": 2.0, "failures": 0.0, "format": "filter-1", "orders": [13]}','9315ebeefb8ebc1a0c7bcf28b54ffabe9720bae283d574c3553f6a7363d5465b','2026-11-22T19:21:36.550301+00:00','shared',NULL,1);
CREATE TABLE dpicl_queries (
	counter_id INTEGER NOT NULL, 
	"query" VARCHAR(64) NOT NULL, 
	number BIGINT NOT NULL, 
	PRIMARY KEY (counter_id, "query")
)
 WITHOUT ROWID

;
INSERT INTO "dpicl_queries" VALUES(1,'2b3578810b9f8f3ddc0ab440e2e3c1f18d8277749812abc25e114e8e19438032',1);
INSERT INTO "dpicl_queries" VALUES(1,'52596e6a24a7b7c2f5c67398cceae915e41949f5a80d76d277139ef28c0c0fbe',3);
INSERT INTO "dpicl_queries" VALUES(1,'be11924605da3ce15b580f7c007c8d5483417d0da369176a84ffdc2fef88ddb8',2);
COMMIT;
