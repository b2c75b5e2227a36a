PRAGMA application_id=1146112323;
BEGIN TRANSACTION;
CREATE TABLE dpicl_lines (
	plan_id INTEGER NOT NULL, 
	line VARCHAR(255) NOT NULL, 
	allowed BIGINT NOT NULL, 
	spent BIGINT NOT NULL, 
	PRIMARY KEY (plan_id, line), 
	CONSTRAINT never_over_spent CHECK (spent >= 0 AND spent <= allowed), 
	FOREIGN KEY(plan_id) REFERENCES dpicl_plans (id)
);
INSERT INTO "dpicl_lines" VALUES(1,'vote',10,3);
INSERT INTO "dpicl_lines" VALUES(2,'joint-em',5,5);
CREATE TABLE dpicl_meta (
	"key" VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "dpicl_meta" VALUES('schema_version','1');
CREATE TABLE dpicl_plans (
	id INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	content TEXT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	created VARCHAR(40) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "dpicl_plans" VALUES(1,'reviews:2025','{"delta": 1e-05, "epsilon": 3.0, "format": 1, "lines": {"vote": {"count": 10, "mechanism": "vote", "options": {}, "parameter": 1.90259, "rate": 0.2, "weight": 1.0}}}','b23be945bafcd90579f82ea74fc8d19425c2dae28d0a8352645a3b382a8b5f97','2026-11-22T02:57:18.041173+00:00');
INSERT INTO "dpicl_plans" VALUES(2,'other','{"delta": 1e-06, "epsilon": 2.0, "format": 1, "lines": {"joint-em": {"count": 5, "mechanism": "joint-em", "options": {}, "parameter": 2.16349, "rate": 0.1, "weight": 1.0}}}','e47cff8e83809856b110cd693e00157deaab8701006799ae8568afd37dd9cbc4','2026-11-22T02:57:18.185677+00:00');
CREATE TABLE dpicl_releases (
	plan_id INTEGER NOT NULL, 
	line VARCHAR(255) NOT NULL, 
	number BIGINT NOT NULL, 
	charged VARCHAR(40) NOT NULL, 
	receipt TEXT, 
	PRIMARY KEY (plan_id, line, number)
)
 WITHOUT ROWID

;
INSERT INTO "dpicl_releases" VALUES(1,'vote',1,'2026-11-22T02:57:18.054360+00:00','{"id": "reviews:2025:vote:1", "budget": "reviews:2025", "plan": "b23be945bafcd905", "line": "vote", "number": 1, "mechanism": "the winner of the counts of every label plus discrete Gaussian noise of sigma 1.90259 each", "epsilon_spent": 1.4107921224660858, "epsilon": 3.0, "delta": 1e-05, "remaining": 9, "time": "2026-11-22T02:57:18.054360+00:00"}');
INSERT INTO "dpicl_releases" VALUES(1,'vote',2,'2026-11-22T02:57:18.054360+00:00',NULL);
INSERT INTO "dpicl_releases" VALUES(1,'vote',3,'2026-11-22T02:57:18.054360+00:00','{"id": "reviews:2025:vote:3", "budget": "reviews:2025", "plan": "b23be945bafcd905", "line": "vote", "number": 3, "mechanism": "the winner of the counts of every label plus discrete Gaussian noise of sigma 1.90259 each", "epsilon_spent": 1.9401186710492166, "epsilon": 3.0, "delta": 1e-05, "remaining": 7, "time": "2026-11-22T02:57:18.054360+00:00"}');
INSERT INTO "dpicl_releases" VALUES(2,'joint-em',1,'2026-11-22T02:57:18.204729+00:00','{"id": "other:joint-em:1", "budget": "other", "plan": "e47cff8e83809856", "line": "joint-em", "number": 1, "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 0.568303139772361, "epsilon": 2.0, "delta": 1e-06, "remaining": 4, "time": "2026-11-22T02:57:18.204729+00:00"}');
INSERT INTO "dpicl_releases" VALUES(2,'joint-em',2,'2026-11-22T02:57:18.204729+00:00','{"id": "other:joint-em:2", "budget": "other", "plan": "e47cff8e83809856", "line": "joint-em", "number": 2, "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 1.0945253610392005, "epsilon": 2.0, "delta": 1e-06, "remaining": 3, "time": "2026-11-22T02:57:18.204729+00:00"}');
INSERT INTO "dpicl_releases" VALUES(2,'joint-em',3,'2026-11-22T02:57:18.204729+00:00','{"id": "other:joint-em:3", "budget": "other", "plan": "e47cff8e83809856", "line": "joint-em", "number": 3, "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 1.510457877938154, "epsilon": 2.0, "delta": 1e-06, "remaining": 2, "time": "2026-11-22T02:57:18.204729+00:00"}');
INSERT INTO "dpicl_releases" VALUES(2,'joint-em',4,'2026-11-22T02:57:18.204729+00:00','{"id": "other:joint-em:4", "budget": "other", "plan": "e47cff8e83809856", "line": "joint-em", "number": 4, "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 1.7959107707159538, "epsilon": 2.0, "delta": 1e-06, "remaining": 1, "time": "2026-11-22T02:57:18.204729+00:00"}');
INSERT INTO "dpicl_releases" VALUES(2,'joint-em',5,'2026-11-22T02:57:18.204729+00:00','{"id": "other:joint-em:5", "budget": "other", "plan": "e47cff8e83809856", "line": "joint-em", "number": 5, "mechanism": "a sequence of keywords with probability proportional to exp(2.16349 * utility / 4)", "epsilon_spent": 2.0, "epsilon": 2.0, "delta": 1e-06, "remaining": 0, "time": "2026-11-22T02:57:18.204729+00:00"}');
COMMIT;
