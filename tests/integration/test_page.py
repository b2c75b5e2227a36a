"""The page of `serving/app.py` in a real browser against real routes, and what its response says without one.

After every test in the browser: no request went to another origin, and the console is silent but for the statuses of
requests that the test asked for. Chains vote at epsilon 1000, where noise differs from zero with a probability below
1e-20.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium, served, until
from ears import Spy
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda, RunnableParallel

from langchain_dpicl import (
    DPAggregate,
    Keywords,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    PrivateHead,
)
from langchain_dpicl.serving.app import add_page

fastapi = pytest.importorskip("fastapi")

LABELS = ["Positive", "Negative"]
SCRIPT = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
KEYS = {"Bearer key-of-alice": "alice", "Bearer key-of-bob": "bob"}


class Switch(dict[str, bool], Spy):
    pass


BAD = Switch({"failing": False})

# All pages of this file show budgets on one store.
pytestmark = pytest.mark.filterwarnings("ignore:the budget .* is used with data:langchain_dpicl.errors.PrivacyWarning")


# -- a server with a page for each chain -------------------------------------------------------------------------------

Put = Callable[..., Any]


@pytest.fixture(scope="module")
def put(tmp_path_factory: pytest.TempPathFactory, store_of: Any, records: Any) -> Put:
    """put(app, name, member, ...): a chain at ``/api/NAME`` and its page at ``/NAME``; gives its budget."""
    from langchain_dpicl.serving.routes import add_dp_routes

    folder: Path = tmp_path_factory.mktemp("ledgers")
    store = store_of(records(8))

    def caller(request: Any) -> str | None:
        return KEYS.get(request.headers.get("authorization", ""))

    def make(
        app: Any,
        name: str,
        member: Callable[[Any], Any] = lambda values: "Positive",
        aggregator: Any = None,
        *,
        epsilon: float = 1000.0,
        releases: int = 10,
        needs_key: bool = False,
        return_receipt: bool = True,
        beside: PrivateHead | None = None,
        **policy: Any,
    ) -> PrivacyBudget:
        budget = PrivacyBudget(epsilon, 1e-5, releases, f"sqlite:///{folder / name}.db", name, **policy)
        everybody = {"threshold": -1.0} if budget.tickets else {}
        selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8, **everybody)
        aggregate = DPAggregate(aggregator or NoisyVote(LABELS), budget, return_receipt=return_receipt)
        chain: Any = PrivateEnsemble(selector, RunnableLambda(member)) | aggregate
        if beside is not None:
            chain = RunnableParallel(kind=chain, head=RunnableLambda(itemgetter("input")) | beside)
        principal_from = caller if needs_key else lambda request: "anyone"
        add_dp_routes(app, chain, f"/api/{name}", principal_from=principal_from)
        add_page(
            app,
            api=f"/api/{name}",
            path=f"/{name}",
            title="Is this review kind?",
            needs_key=needs_key,
            beside=beside is not None,
        )
        return budget

    return make


def put_head(app: Any, folder: Path, store: Any) -> PrivateHead:
    """A head that was fitted in this folder and loaded from its file, at ``/api/head``, and its page at ``/head``."""
    from langchain_dpicl.serving.routes import add_dp_routes

    budget = PrivacyBudget(2.0, 1e-5, {"head": 1}, f"sqlite:///{folder}/heads.db", "desk-head")
    # Sums of 8 owners, divided by 8,000: no label is far from one half, whatever the noise.
    PrivateHead.fit(store, LABELS, budget, owners=8_000, progress=False).save(folder / "head.npz")
    budget.close()
    head = PrivateHead.load(folder / "head.npz", DeterministicFakeEmbedding(size=store.dimension))
    add_dp_routes(
        app, head, "/api/head", principal_from=lambda request: KEYS.get(request.headers.get("authorization", ""))
    )
    add_page(app, api="/api/head", path="/head", title="Is this review kind?", head=True)
    return head


def sometimes(values: Any) -> str:
    if BAD["failing"]:
        raise ConnectionError
    return "Positive"


class Gate(threading.Event, Spy):
    pass


@pytest.fixture(scope="module")
def gate() -> threading.Event:
    """Members of the chain "slow" answer when it is set."""
    return Gate()


@pytest.fixture(scope="module")
def budgets(
    put: Put, gate: threading.Event, tmp_path_factory: pytest.TempPathFactory, store_of: Any, records: Any
) -> tuple[Any, dict[str, PrivacyBudget]]:
    app = fastapi.FastAPI()
    head = put_head(app, tmp_path_factory.mktemp("head"), store_of(records(8)))
    fields = ["renew", "metformin", "pharmacy", "bill", "doctor"]
    made = {
        "desk": put(app, "desk", needs_key=True, releases=20),
        "own": put(app, "own", needs_key=True, releases=1, scope="per_principal", replay=False),
        "shape": put(app, "shape", epsilon=3.0, releases=100),
        "spent": put(app, "spent", releases=2, replay=False),
        "kept": put(app, "kept", releases=1),
        "public": put(app, "public", releases=1, on_exhausted="zero_shot", replay=False),
        "script": put(app, "script", lambda values: SCRIPT, NoisyVote([SCRIPT, "b"])),
        "scores": put(app, "scores", aggregator=NoisyVote(LABELS, scores=True)),
        "details": put(app, "details", aggregator=NoisyVote(LABELS, details=True)),
        "words": put(app, "words", lambda values: "renew metformin", Keywords.joint_em(domain=fields, k=2)),
        "bare": put(app, "bare", return_receipt=False),
        "slow": put(app, "slow", lambda values: gate.wait(20) and "Negative", replay=False),
        "down": put(app, "down", sometimes),
        "endless": put(app, "endless", releases=2, replay=False, tickets=True),
        "both": put(app, "both", epsilon=3.0, beside=head),
    }
    return app, made


@pytest.fixture(scope="module")
def origin(budgets: Any) -> Iterator[str]:
    with served(budgets[0]) as address:
        yield address
    for budget in budgets[1].values():
        budget.close()


# -- a browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(driver: Any, origin: str) -> Iterator[Page]:
    page = Page(driver, origin)
    page.look()
    yield page
    page.quiet()
    driver.execute_script("sessionStorage.clear()")


# -- asking ------------------------------------------------------------------------------------------------------------


def test_a_question_gets_an_answer_with_receipt_bar_and_plot(page: Page, budgets: Any) -> None:
    page.open("desk")
    page["#key"].send_keys("key-of-alice")
    page.ask("a witty, seductive movie")
    assert page.text("#answer .said") == "Positive"
    page.until_text("#lines", "19 of 20 answers left")
    assert "19 answers left" in page.text("#answer")
    bar = page["#lines [role=meter]"]
    assert (bar.get_attribute("aria-valuenow"), bar.get_attribute("aria-valuetext")) == ("95", "19 of 20 answers left")
    assert page.run("const [bar] = arguments; return bar.firstChild.offsetWidth / bar.clientWidth", bar) == (
        pytest.approx(0.95, abs=0.01)
    )
    page["#receipt summary"].click()
    for words in (
        "desk:vote-em:1",
        "a label with probability proportional to exp(",
        "all callers may collude",
        "1000",
        "0.00001",
    ):
        assert words in page["#receipt"].text
    spent = budgets[1]["desk"].epsilon_spent()
    page.ask("another")
    page.until_text("#plot desc", "each of 2 answers")
    assert page.run("return document.querySelectorAll('#plot .curve').length") == 1
    assert "at most 1000" in page.text("#plot .promise")
    page["#rows summary"].click()
    rows = [row.split() for row in page["#rows tbody"].text.splitlines()]
    assert [row[-2] for row in rows] == ["released", "released"]
    assert spent <= float(rows[1][-1]) <= spent * 1.01, "the first, below: three digits, rounded up"


def test_the_same_question_again_says_that_it_cost_nothing(page: Page, budgets: Any) -> None:
    page.open("kept").ask("one")
    page.ask("one")
    assert "the same answer again, at no cost" in page.text("#answer")
    assert budgets[1]["kept"].spent() == 1


def test_with_the_keyboard_alone(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open("desk")
    seen = []
    for _ in range(4):
        page.press(Keys.TAB)
        seen.append(page.focus)
    assert seen == ["key", "keep", "question", "send"], "before anything is known, nothing else is in the way"
    page.back()
    page.back()
    page.press(Keys.SPACE)
    page.back()
    page.press("key-of-alice", Keys.ENTER)
    assert page.focus == "question"
    page.until_text("#lines", "answers left")
    page.press("two", Keys.ENTER, "lines")
    assert page.text("#send") == "Ask"
    assert page["#question"].get_attribute("value") == "two\nlines", "Enter alone asks nothing"
    page.submit()
    page.settle()
    assert page.text("#answer .said") == "Positive"
    assert page.focus == "question"
    seen = []
    while page.focus != "body" and len(seen) < 12:
        width, style = page.run(
            "const s = getComputedStyle(document.activeElement); return [s.outlineWidth, s.outlineStyle]"
        )
        assert (width, style) == ("3px", "solid"), f"the focus on {page.focus} can be seen"
        page.press(Keys.TAB)
        seen.append(page.focus)
    assert seen[0] == "send"
    assert seen.count("summary") == 3, "the receipt, the table, the promise"
    page.driver.refresh()
    page.until_text("#lines", "answers left")
    assert page["#key"].get_attribute("value") == "key-of-alice", "kept, since the box was ticked"


def test_while_one_question_is_asked_no_other_can_be(page: Page, budgets: Any, gate: threading.Event) -> None:
    page.open("slow")
    page.until_text("#lines", "10 of 10")
    place = page["#budget"].rect["y"]
    page.type("slowly")
    page.submit()
    until(lambda: budgets[1]["slow"].spent() == 1)
    assert page.text("#send") == "Asking…"
    assert page["#send"].get_attribute("aria-disabled") == "true"
    assert page["#answer"].get_attribute("aria-busy") == "true"
    assert page.text("#progress") == "Asking…"
    page.submit()
    page["#send"].click()
    gate.set()
    page.settle()
    assert page.text("#answer .said") == "Negative"
    assert page["#answer"].get_attribute("aria-busy") == "false"
    page.until_text("#lines", "9 of 10")
    assert budgets[1]["slow"].spent() == 1
    assert page["#budget"].rect["y"] == place, "the answer moves nothing"


def test_every_kind_of_answer_is_shown(page: Page) -> None:
    page.open("scores").ask("how much")
    rows = dict(line.split() for line in page["#answer table"].text.splitlines())
    assert set(rows) == set(LABELS)
    assert float(rows["Positive"]) > float(rows["Negative"])
    page.open("details").ask("how sure")
    assert page.text("#answer .said") == "Positive"
    assert re.search(r"Confidence \d\d\.\d%; votes with noise:", page.text("#answer"))
    rows = dict(line.split() for line in page["#answer table"].text.splitlines())
    assert rows["Negative"] == "0"
    assert 1 <= int(rows["Positive"]) <= 4, "buckets without an example count nothing"
    page["#receipt summary"].click()
    assert "the counts of every label plus discrete Gaussian noise" in page["#receipt"].text
    page.open("words").ask("which")
    words = page.run("return [...document.querySelectorAll('#answer li')].map((item) => item.textContent)")
    assert sorted(words) == ["metformin", "renew"]
    page.open("bare").ask("no receipt")
    assert page.text("#answer .said") == "Positive"
    assert not page["#receipt"].is_displayed()


def test_an_answer_that_is_a_script_is_shown_as_text(page: Page) -> None:
    page.open("script").ask("attack")
    assert page.text("#answer .said") == SCRIPT
    assert page.driver.title == "Is this review kind?"
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0


# -- when there is no answer -------------------------------------------------------------------------------------------


def test_a_blank_question_is_not_sent(page: Page, budgets: Any) -> None:
    page.open("bare")
    before = budgets[1]["bare"].spent()
    page.ask("   ")
    assert page.text("#problem") == "Write a question first."
    assert (page.focus, page["#question"].get_attribute("aria-invalid")) == ("question", "true")
    assert budgets[1]["bare"].spent() == before


@pytest.mark.parametrize("key", ["", "key-of-mallory", "schlüssel"])
def test_without_a_known_key_the_page_asks_for_one(page: Page, budgets: Any, key: str) -> None:
    before = budgets[1]["desk"].spent()
    page.open("desk")
    page["#key"].send_keys(key)
    page.ask("let me in")
    page.until_text("#key-error", "not known here" if key else "A key is needed")
    until(lambda: page.focus == "key")
    assert page["#key"].get_attribute("aria-invalid") == "true"
    assert page.text("#lines") == ""
    assert not page["#history"].is_displayed()
    assert budgets[1]["desk"].spent() == before
    page["#key"].clear()
    page["#key"].send_keys("key-of-bob")
    page.ask("let me in")
    assert page.text("#answer .said") == "Positive"
    assert page.text("#key-error") == ""


def test_with_another_key_nothing_is_left_of_what_the_one_before_saw(page: Page) -> None:
    page.open("desk")
    page["#keep"].click()
    page["#key"].send_keys("key-of-alice\n")
    page.until_text("#lines", "answers left")
    assert "key-of-alice" in page.run("return Object.values(sessionStorage)")
    page["#key"].clear()
    page["#key"].send_keys("key-of-mallory\n")
    page.until_text("#key-error", "not known here")
    assert page.text("#lines") == ""
    assert not page["#history"].is_displayed()
    assert page.run("return sessionStorage.length") == 0
    page.run("sessionStorage.setItem('dpicl key /api/desk', 'revoked-since')")
    page.driver.refresh()
    page.until_text("#key-error", "not known here")
    assert page.run("return sessionStorage.length") == 0


def test_a_spent_budget_says_so_and_closes_the_form(page: Page, budgets: Any) -> None:
    page.open("spent")
    page.until_text("#lines", "2 of 2")
    budgets[1]["spent"].line("vote", 1.0).charge(2)
    page.ask("too late")
    assert "cost nothing" in page.text("#problem")
    said = "The budget is spent. No further answers, for anyone: this is the promise being kept."
    page.until_text("#spent", said)
    assert page.text("#spent") == said
    assert page["#send"].get_attribute("aria-disabled") == "true"
    assert "0 of 2 answers left" in page.text("#lines")
    page.submit()
    assert page.text("#send") == "Ask"


def test_a_spent_budget_that_replays_still_answers_what_was_asked(page: Page) -> None:
    page.open("kept")
    page.ask("one")
    page.until_text("#spent", "What was asked before is still answered, at no cost.")
    page.ask("two")
    assert "The budget is spent" in page.text("#problem")
    page.ask("one")
    assert page.text("#answer .said") == "Positive"


def test_where_the_model_goes_on_alone_the_page_says_that_it_does(page: Page) -> None:
    page.open("public").ask("one")
    page.until_text("#spent", "answers on its own, without the private examples")
    page.ask("two")
    assert page.text("#answer .said") == "Positive"
    assert "nothing of the private examples was used" in page.text("#answer")


def test_a_budget_of_ones_own_is_spent_for_oneself(page: Page) -> None:
    page.open("own")
    page["#key"].send_keys("key-of-alice")
    page.ask("mine")
    page.until_text("#spent", "Your budget is spent. No further answers for you")
    assert "who does not pool answers" in page.text("#promise")
    page["#key"].clear()
    page["#key"].send_keys("key-of-bob\n")
    page.until_text("#lines", "1 of 1")
    assert page.text("#spent") == ""
    assert page["#send"].get_attribute("aria-disabled") == "false"


def test_a_budget_whose_owners_pay_has_no_last_answer_and_no_bar(page: Page, budgets: Any) -> None:
    page.open("endless")
    page.until_text("#lines", "0 answers so far")
    for number in (1, 2, 3):  # the third, when no owner has a ticket, looks like the others
        page.ask(f"question {number}")
        page.until_text("#lines", f"{number} answer{'' if number == 1 else 's'} so far")
        assert page.text("#answer .said") in (("Positive",) if number < 3 else ("Positive", "Negative"))
        assert page.text("#answer .small") == "A new answer, charged to the budget."
    assert page.text("#h-budget") == "So far"
    assert page.text("#uses") == "There is no last answer."
    assert page.run("return document.querySelectorAll('#lines [role=meter]').length") == 0
    assert "at most 1000" in page.text("#loss")
    assert page.text("#spent") == ""
    assert page["#send"].get_attribute("aria-disabled") == "false"
    promise = page["#promise details"].text
    said = "There is no last answer: all examples of one “owner” are used for at most 2 questions near to them."
    assert said in promise
    assert len(promise.split()) <= 130
    left = page.run("return [...document.querySelectorAll('#receipt dt')].map((each) => each.textContent)")
    assert "Left" not in left


def test_a_head_answers_without_end_and_says_what_it_cost_once(page: Page) -> None:
    page.open("head")
    assert page.text("#uses") == "Questions cost nothing."
    assert page.text("#h-budget") == "What it cost"
    assert not page["#receipt"].is_displayed()
    page["#key"].send_keys("key-of-alice")
    for number in range(3):
        page.ask(f"question {number}")
        label = page.text("#answer .said")
        assert label in LABELS
        rows = [row.rsplit(" ", 1) for row in page["#answer table"].text.splitlines()]
        assert {name for name, _ in rows} == set(LABELS)
        assert rows[0][0] == label, "the most probable first"
        assert sum(float(share.rstrip("%")) for _, share in rows) == pytest.approx(100, abs=0.11)
        assert page.text("#answer .small") == "It cost nothing."
    page.until_text("#lines", "Unlimited questions")
    assert re.fullmatch(r"Unlimited questionscost once: ε (1\.\d+|2)", page.text("#lines"))
    assert page.text("#loss") == "Privacy loss: at most ε 2, however many questions are asked."
    page["#receipt summary"].click()
    for words in ("desk-head:head:1", "discrete Gaussian noise", "all callers may collude"):
        assert words in page["#budget #receipt"].text
    assert "Fits left" in page["#receipt"].text, "the receipt is the fit's: no answer is left over or used up"
    assert not page["#history"].is_displayed()
    assert page.run("return document.querySelectorAll('[role=meter]').length") == 0
    promise = page["#promise details"].text
    for words in ("any one contributor’s examples", "7.4 times", "with ε = 2", "1 in 100,000", "no last answer"):
        assert words in promise
    shown = page.run("return [1, 0.9991, 0.999, 0.5, 0.001, 0.0009, 0].map(percent)")
    assert shown == ["over 99.9%", "over 99.9%", "99.9%", "50.0%", "0.1%", "under 0.1%", "under 0.1%"]
    page["#key"].clear()
    page["#key"].send_keys("key-of-mallory\n")
    page.until_text("#key-error", "not known here")
    assert page.text("#lines") == ""
    assert not page["#receipt"].is_displayed()
    page.ask("let me in")
    assert page.text("#answer") == "Not asked: the key is missing or not known."


def test_a_head_beside_a_budget_is_counted_in_the_promise(page: Page) -> None:
    page.open("both")
    page.until_text("#loss", "Released once beside it: ε 2 more.")
    promise = page["#promise details"].text
    for words in ("with ε = 5", "about 148 times", "1 in 50,000"):
        assert words in promise


def test_a_model_that_is_down_is_said_to_be_down(page: Page) -> None:
    BAD["failing"] = True
    page.open("down").ask("one")
    assert "so it was charged" in page.text("#problem")
    page.ask("two")
    assert "The model does not answer just now. This cost nothing." in page.text("#problem")
    BAD["failing"] = False
    page.ask("three")
    assert page.text("#answer .said") == "Positive"
    assert page.text("#problem") == ""


def test_a_question_that_is_too_long_cost_nothing(page: Page, budgets: Any) -> None:
    page.open("bare")
    before = budgets[1]["bare"].spent()
    page.run("document.getElementById('question').value = 'long '.repeat(20000)")
    page["#send"].click()
    page.until_text("#problem", "The question is too long. It cost nothing.")
    assert budgets[1]["bare"].spent() == before


def test_a_server_that_is_gone_is_said_to_be_gone(page: Page, put: Put) -> None:
    app = fastapi.FastAPI()
    budget = put(app, "gone")
    everything = page.origin
    with served(app) as page.origin:
        page.open("gone")
        page.until_text("#lines", "10 of 10")
    page.ask("anybody there?")
    assert "The server cannot be reached." in page.text("#problem")
    assert "asking the same again costs nothing more" in page.text("#problem")
    page.quiet()
    page.origin = everything
    budget.close()


# -- for everybody -----------------------------------------------------------------------------------------------------


def test_the_promise_is_short_and_has_the_real_numbers(page: Page) -> None:
    page.open("shape")
    page.until_text("#promise", "After 100 answers there are no more.")
    promise = page["#promise details"].text
    for words in ("about 20 times", "ε = 3", "1 in 100,000", "any one “owner”", "pool their answers", "Not promised"):
        assert words in promise
    assert len(promise.split()) <= 120
    assert "Nothing was answered so far" in page.text("#plot desc")


def test_everything_has_a_name_and_a_place(page: Page) -> None:
    page.open("desk")
    page["#key"].send_keys("key-of-alice")
    page.ask("a witty, seductive movie")
    page.until_text("#lines", "answers left")
    assert page["html"].get_attribute("lang") == "en"
    assert len(page.driver.find_elements("css selector", "h1")) == 1
    levels = [int(each.tag_name[1]) for each in page.driver.find_elements("css selector", "h1, h2, h3")]
    assert levels == sorted(levels)
    names = {
        each.get_attribute("id"): each.accessible_name
        for each in page.driver.find_elements("css selector", "input, textarea")
    }
    assert names == {"key": "Your key", "keep": "Keep it until this tab is closed", "question": "Your question"}
    for selector, role in (("header", "banner"), ("main", "main"), ("#ask", "form"), ("#budget", "region")):
        assert page[selector].aria_role == role
    assert page["#lines [role=meter]"].accessible_name == "Budget"
    assert page["#plot svg"].accessible_name == "Privacy loss (ε) against answers"
    for selector in ("#problem", "#key-error"):
        assert page[selector].get_attribute("role") == "alert"
    ids = page.run("return [...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    refers = "[aria-labelledby], [aria-describedby]"
    for each in page.driver.find_elements("css selector", refers):
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((each.get_attribute(name) or "").split()) <= set(ids)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_can_be_read_in_both_themes(page: Page, theme: str) -> None:
    page.look(theme)
    page.open("desk")
    page.ask("no key, so there is an error to read")
    page["#key"].send_keys("key-of-alice")
    page.ask("a witty, seductive movie")
    page.until_text("#lines", "answers left")
    for summary in page.driver.find_elements("css selector", "#receipt summary, #rows summary"):
        summary.click()
    found = page.contrasts()
    page.open("kept").ask("one")
    page.ask("two")
    page.until_text("#spent", "The budget is spent")
    found += page.contrasts()
    assert len(found) > 60
    assert [each for each in found if each[2] < each[1]] == []
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 384) == (theme == "light")


@pytest.mark.parametrize("width", [320, 640])
def test_nothing_is_cut_off_on_a_narrow_screen(page: Page, width: int) -> None:
    page.look(width=width, height=640)
    page.open("script").ask("a long answer " + "x" * 200)
    page.until_text("#lines", "answers left")
    for summary in page.driver.find_elements("css selector", "#receipt summary, #rows summary"):
        summary.click()
    assert page.run("return document.documentElement.scrollWidth") <= width
    wide = page.run("""return [...document.querySelectorAll("main *")]
      .filter((each) => !each.closest(".scroll") && each.getClientRects().length)
      .filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML)""")
    assert wide == []
