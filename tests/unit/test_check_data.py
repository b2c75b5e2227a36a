"""Data files as users have them: found out, refused by line, skipped when asked, and never shown."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from moments import exemplars_of
from table_model import TableModel

from langchain_dpicl import ExemplarStore, local
from langchain_dpicl.aggregators.votes import reader_of
from langchain_dpicl.cli import main
from langchain_dpicl.decoding import documents
from langchain_dpicl.errors import InvalidParameter, InvalidRecords, MissingExtra
from langchain_dpicl.store.datacheck import NO_KEYS, Checked, check_file
from langchain_dpicl.store.datafile import Reading, read_data
from langchain_dpicl.store.records import RecordKeys

KEYS = RecordKeys("text", "label", None)
OWNED = RecordKeys("text", "label", "who")
SECRET = "CANARY-mrs-alder"
ROWS = [{"text": "très bon, merci", "label": "good"}, {"text": "mauvais; hélas", "label": "bad"}]


def csv_of(delimiter: str, *rows: str, header: str = "text,label") -> str:
    return "\n".join([header, *rows]).replace(",", delimiter) + "\n"


def check(folder: Path, name: str, content: bytes | str, keys: RecordKeys = KEYS, **how: Any) -> Checked:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    labels = reader_of(["good", "bad"])
    reading = Reading(**{each: how.pop(each) for each in Reading._fields if each in how})
    return check_file(folder / name, keys, reading, label_of=labels, **how)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("ending", ["\r\n", ""])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
def test_the_header_shows_the_delimiter_and_another_encoding_is_named(
    tmp_path: Path, delimiter: str, encoding: str, ending: str
) -> None:
    text = f'"text"{delimiter}label\r\n"très bon, merci"{delimiter}good\r\n"mauvais; hélas"{delimiter}bad{ending}'
    content = text.encode(encoding)
    assert check(tmp_path, "r.csv", content, encoding=encoding).records == ROWS
    if encoding.startswith("utf-8"):
        assert check(tmp_path, "r.csv", content).records == ROWS
        return
    with pytest.raises(InvalidRecords, match=r"'r\.csv'.* bytes that are not UTF-8, see --encoding") as caught:
        check(tmp_path, "r.csv", content).usable(False, str)
    assert "line 1" in str(caught.value) or "(lines 2 and 3)" in str(caught.value)
    assert "bon" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("text,label,a;b;c", "text|label|a;b;c"),
        ('text;"a,b,c";label,d', "text|a,b,c|label,d"),
        ("text,label;n", "text|label;n"),
        ("text|label,of\ttoday|n", "text|label,of\ttoday|n"),
        ('"text";"5"" nail, flat"', 'text|5" nail, flat'),
        ("text of today", "text of today"),
    ],
)
@pytest.mark.parametrize("record", ["a", "a,b,c,d,e", "a;b;c;d;e", '"a\tb";c'])
def test_the_header_line_alone_shows_the_delimiter(tmp_path: Path, header: str, columns: str, record: str) -> None:
    """The one that it has most often outside of quotes, of equals the first one; no record has a say."""
    (tmp_path / "r.csv").write_text(f"{header}\n{record}\n")
    assert read_data(tmp_path / "r.csv").columns == tuple(columns.split("|"))


def test_a_delimiter_may_be_named_and_that_of_tsv_is_a_tab(tmp_path: Path) -> None:
    rows = "x,y;z\n1,2;3\n"
    assert check(tmp_path, "r.csv", rows, NO_KEYS, is_private=False, delimiter="semicolon").records == [
        {"x,y": "1,2", "z": "3"}
    ]
    assert check(tmp_path, "r.tsv", "x,y,z\tn\n1,2\t3\n", NO_KEYS, is_private=False).records == [
        {"x,y,z": "1,2", "n": "3"}
    ]


MIXED = "text,label\nhélas,bad\n".encode() + "très bon,good\n".encode("cp1252")


def test_no_record_decides_how_another_is_read(tmp_path: Path) -> None:
    """One owner's line that is not UTF-8 must not turn the others' letters into cp1252's."""
    checked = check(tmp_path, "r.csv", MIXED)
    assert [record["text"] for record in checked.records] == ["hélas"]
    assert checked.faults == [(3, "bytes that are not UTF-8, see --encoding")]
    assert check(tmp_path, "r.csv", MIXED, encoding="cp1252").records[1]["text"] == "très bon"


@pytest.mark.parametrize(
    ("encoding", "half"),
    [
        ("utf-8", b"\xc3"),
        ("utf-16-le", b"\x00\xd8"),
        ("utf-16-be", b"\xd8\x00"),
        ("gb18030", b"\x81\x30\x81"),
        ("shift_jis", b"\x81"),
        ("euc-kr", b"\xa1"),
    ],
)
def test_half_of_a_letter_takes_no_line_end_with_it(tmp_path: Path, encoding: str, half: bytes) -> None:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in ROWS]
    plain = [line.replace("è", "e").replace("é", "e").encode(encoding) for line in lines]
    content = plain[0] + half + "\n".encode(encoding) + plain[1]
    checked = check(tmp_path, "r.jsonl", content, encoding=encoding)
    assert [record["label"] for record in checked.records] == ["good", "bad"]
    assert checked.faults == [(2, f"bytes that are not {encoding.upper()}, see --encoding")]


def test_an_open_quote_is_refused_even_if_bad_records_are_skipped(tmp_path: Path) -> None:
    """It may hide the records of others, who would come and go with it."""
    for rows in ('"never closed,good\nb,bad\nc,bad\n', '"a,good\n"b",bad\n'):
        with pytest.raises(InvalidRecords, match=r"a quote in line 2 .* is not closed"):
            check(tmp_path, "r.csv", f"text,label\n{rows}", skip_bad=True)


@pytest.mark.parametrize(
    ("name", "content", "problem", "line"),
    [
        ("r.csv", csv_of(",", "a,good", "CANARY-mrs-alder,bad,more"), "more or fewer fields", 3),
        ("r.csv", csv_of(",", "a,good", "CANARY-mrs-alder"), "more or fewer fields", 3),
        ("r.csv", csv_of(",", "a,good", '"CANARY-mrs-alder" b,good', "c,bad"), "quotes that do not match", 3),
        ("r.csv", csv_of(",", "a,good", "CANARY-mrs-alder\0,good"), "NUL bytes", 3),
        ("r.csv", csv_of(",", "a,good", "\ufefftext,label"), "the header again", 3),
        ("r.csv", csv_of(",", "a,good", "b,bad", '"CANARY-\nmrs-alder"'), "more or fewer fields", 4),
        ("r.csv", csv_of(",", "a,good", '"CANARY\n-\n",', "b,bad"), "nothing under 'label'", 3),
        ("r.csv", csv_of(",", "a,good", "CANARY-mrs-alder,"), "nothing under 'label'", 3),
        (
            "r.csv",
            csv_of(",", "a,good", "CANARY-mrs-alder,CANARY-gout"),
            "no label of the list under 'label'",
            3,
        ),
        ("r.csv", csv_of(",", "a,good", " ,good"), "no text under 'text'", 3),
        ("r.csv", csv_of(",", "a,good,x", "b,good, ", header="text,label,who"), "no owner", 3),
        ("r.jsonl", '{"text": "a", "label": "good"}\n["CANARY-mrs-alder"]', "no JSON object", 2),
        ("r.jsonl", '{"text": "a", "label": "good"}\n\n{"text": "CANARY-mrs-alder"}', "nothing under 'label'", 3),
        ("r.jsonl", '{"text": "a", "label": "good"}\n{"text": "CANARY-mrs-alder", "label": 1.5}', "neither a text", 2),
        (
            "r.jsonl",
            '{"text": "a", "label": "good"}\n{"text": ["CANARY-mrs-alder"], "label": "good"}',
            "no text under",
            2,
        ),
    ],
)
def test_a_bad_record_is_refused_by_line_and_skipped_when_asked(
    tmp_path: Path, name: str, content: str, problem: str, line: int
) -> None:
    checked = check(tmp_path, name, content, OWNED if "who" in content else KEYS)
    with pytest.raises(InvalidRecords, match="cannot be used") as caught:
        checked.usable(False, str)
    said: list[str] = []
    assert checked.usable(True, said.append)[0]["text"] == "a"
    for words in (str(caught.value), said[0]):
        assert f"1 of {len(checked.records) + 1} records" in words
        assert problem in words
        assert f"(line {line})" in words
        assert "CANARY" not in words


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("r.csv", b"", "holds no records"),
        ("r.csv", b"\n \n", "holds no records"),
        ("r.csv", b"text,label\n", "holds no records"),
        ("r.csv", b"text,label,label\nCANARY,good,bad\n", "alike, or not at all .columns 2 and 3"),
        (
            "r.csv",
            b"Text,Label\nCANARY,good\n",
            "but 'Text', 'Label'. Name yours with --input-key, mend the header",
        ),
        (
            "r.csv",
            b"review,label\nCANARY,good\n",
            "'text', but 'review', 'label'. Name yours with --input-key",
        ),
        ("r.csv", b"CANARY,good,Anna\nx,bad,y\n", r"but 3 fields \(is its first .* mend the header"),
        ("r.csv", b'text,label\n"CANARY"s,5" x\nb,good\n', "a quote in line 2 .* not closed"),
        ("r.csv", b'text,label\n"CANARY"s,5" x,"open\nb,good\nend",bad\n', "a quote in line 2 .* not closed"),
        ("r.csv", "text,label\na,good\n".encode("utf-16-le"), "line 1, has NUL bytes, see --encoding"),
        ("r.csv", "text,été\nCANARY,good\n".encode("cp1252"), "line 1, has bytes that are not UTF-8, see --encoding"),
        ("r.csv", b'"text" x,label\nCANARY,good\n', "line 1, has quotes that do not match"),
        ("r.parquet", b"PAR1 CANARY", "pyarrow does not read it"),
        ("r.csv", b"text,label,,\nCANARY,good,,\n", "alike, or not at all .columns 3 and 4"),
        ("r.csv", bz2.compress(b"text,label\nCANARY,good\n"), "line 1, has bytes that are not UTF-8"),
        ("r.csv.gz", gzip.compress(b"text,label\nCANARY,good\n", mtime=0)[:-9], "not a whole gzip file"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_whole(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    with pytest.raises(InvalidRecords, match=says) as caught:
        check(tmp_path, name, content, skip_bad=True)
    assert "CANARY" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "reading", [{"delimiter": "comma, please"}, {"delimiter": '"'}, {"encoding": "rot13"}, {"encoding": "iso-2022-jp"}]
)
def test_a_setting_that_means_nothing(tmp_path: Path, reading: dict[str, str]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(reading))):
        check(tmp_path, "r.csv", csv_of(",", "a,good"), **reading)


@pytest.mark.parametrize("delimiter", [",", ";", "|"])
def test_a_header_may_have_line_breaks_and_empty_rows_above(tmp_path: Path, delimiter: str) -> None:
    text = csv_of(delimiter, "a,good", header='\n,,\n"text\n","label,\r\nof today"')
    keys = RecordKeys("text", f"label{delimiter} of today", None)
    checked = check(tmp_path, "r.csv", text, keys, delimiter=delimiter)
    assert (checked.records, checked.lines) == ([{"text": "a", f"label{delimiter} of today": "good"}], [6])


def test_a_text_may_be_of_any_length_and_a_record_is_named_by_its_first_line(tmp_path: Path) -> None:
    long = "one line of many\n" * 9000
    checked = check(tmp_path, "r.csv", f'text,label\n"{long}",good\nb,bad\n')
    assert checked.records[0]["text"] == long
    assert checked.lines == [2, 9003]


def test_what_is_packed_is_known_by_its_bytes_and_a_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    text = csv_of(",", "a,good")
    assert check(tmp_path, "r.csv", gzip.compress(text.encode())).records == [{"text": "a", "label": "good"}]
    marked = f"\ufeff{text}".encode("utf-16-le")
    assert check(tmp_path, "r.csv", marked, encoding="utf-16-le").records == [{"text": "a", "label": "good"}]


def test_a_key_twice_in_an_object_is_a_fault_of_its_line(tmp_path: Path) -> None:
    """The last one would count without a word."""
    lines = (
        '{"text": "a", "label": "good"}',
        '{"text": "b", "label": "bad", "label": "good"}',
        '{"m": {"x": 1, "x": 2}}',
    )
    fault = "no JSON object, or a key twice in one"
    assert check(tmp_path, "r.jsonl", "\n".join(lines)).faults == [(2, fault), (3, fault)]


def test_whole_numbers_are_labels_and_parquet_has_them(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = pandas.DataFrame(
        {"text": ["a", "b", None], "label": [1, 0, 1], "at": pandas.to_datetime(["2026-01-01"] * 3)}
    )
    table.to_parquet(tmp_path / "r.parquet")
    checked = check_file(tmp_path / "r.parquet", KEYS, Reading(), label_of=reader_of(["0", "1"]))
    assert [(record["text"], record["label"]) for record in checked.records] == [("a", "1"), ("b", "0")]
    assert checked.faults == [(3, "no text under 'text'")]
    store = ExemplarStore.from_records(
        checked.records, DeterministicFakeEmbedding(size=2), input_key="text", output_key="label"
    )
    assert len(store) == 2


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"langchain-dpicl\[parquet\]"):
        check(tmp_path, "r.parquet", b"")


def parquet_of(path: Path, values: list[Any], kind: Any) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = values if kind is None else arrow.array(values, kind(arrow))
    labels = ["good"] * len(values)
    parquet.write_table(arrow.table({"text": labels, "label": labels, "m": column}), path)
    return path


@pytest.mark.parametrize(
    ("value", "other", "kind"),
    [
        (2**60 + 1, None, lambda arrow: arrow.int64()),
        ([2**60 + 1, 7], [None], lambda arrow: arrow.list_(arrow.int64())),
        ({"n": 2**60 + 1}, {"n": None}, lambda arrow: arrow.struct([("n", arrow.int64())])),
        ([("k", 2**60 + 1)], [("k", None)], lambda arrow: arrow.map_(arrow.string(), arrow.int64())),
        ([[1, None], []], [None], lambda arrow: arrow.list_(arrow.list_(arrow.int32()))),
        ([{"role": "user", "content": ["x"]}], None, None),
        (True, None, lambda arrow: arrow.bool_()),
        ("kind", None, lambda arrow: arrow.dictionary(arrow.int32(), arrow.string())),
        (Decimal("1.10"), None, lambda arrow: arrow.decimal128(5, 2)),
        (datetime.datetime(2026, 1, 2, 3, 4, 5, 6), None, lambda arrow: arrow.timestamp("ns")),
        ({"k": 1}, {"CANARY": 2}, None),
    ],
)
def test_a_value_in_parquet_is_the_same_beside_a_null_and_a_store_takes_it(
    tmp_path: Path, value: Any, other: Any, kind: Any
) -> None:
    alone, beside = (
        check_file(parquet_of(tmp_path / "r.parquet", values, kind), KEYS, Reading()).records
        for values in ([value], [value, other])
    )
    assert repr(beside[0]) == repr(alone[0])
    assert alone[0]["m"] == value
    model = DeterministicFakeEmbedding(size=2)
    assert len(ExemplarStore.from_records(beside, model, input_key="text", output_key="label")) == 2


def test_a_value_in_parquet_that_nobody_can_keep_is_a_fault_of_its_row(tmp_path: Path) -> None:
    """A command would name it by its place in a store, which is nobody's place in the file."""
    path = tmp_path / "r.parquet"
    checked = check_file(parquet_of(path, [0, 10**9], lambda arrow: arrow.date32()), KEYS, Reading())
    assert (len(checked.records), checked.faults) == (1, [(2, "a value that Python cannot hold under 'm'")])
    checked = check_file(parquet_of(path, [1, 10**9], lambda arrow: arrow.time64("ns")), KEYS, Reading())
    assert (checked.records[0]["m"], [row for row, _ in checked.faults]) == (datetime.time(0, 0, 1), [1])
    ((row, fault),) = check_file(parquet_of(path, [None, b"x"], lambda arrow: arrow.binary()), KEYS, Reading()).faults
    assert (row, fault.split(",")[0]) == (2, "metadata that JSON cannot represent")


def test_a_missing_owner_makes_no_other_unusable_and_an_index_may_be_one(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    for values in ([7], [7.0, None]):
        assert check_file(parquet_of(path, values, None), KEYS._replace(owner_key="m"), Reading()).owners == ["7"]
    odd = check_file(parquet_of(path, [{"b": b"x"}], None), KEYS._replace(output_key="m"), Reading())
    assert odd.faults == [(1, "an object that JSON cannot represent under 'm'")]
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    late = arrow.array([datetime.datetime(9999, 12, 31)], arrow.timestamp("us"))
    table = arrow.table({"text": ["a"], "m": late, "__index_level_0__": ["A"]})
    parquet.write_table(table, path, use_deprecated_int96_timestamps=True)
    checked = check_file(path, RecordKeys("text", None, "__index_level_0__"), Reading())
    assert (checked.owners, checked.records[0]["m"].year) == (["A"], 9999)


def test_a_note_names_records_that_may_hold_those_of_others(tmp_path: Path) -> None:
    rows = 'C,good,"one\ntwo, three"\nA,good,"6 ft\nB,bad,27"\nA,good,"a\nB,bad,b\nc"\n'
    assert "(lines 4 and 6)" in check(tmp_path, "r.csv", f"who,label,text\n{rows}", OWNED).notes["joined"]


def test_a_note_counts_owners_whom_a_spreadsheet_wrote_in_several_ways(tmp_path: Path) -> None:
    """They stay owners of their own: nobody is merged without a word."""
    same = ["123", "123.0", "0123", ' "123"', '"=""123"""', "123\u200b", "１２３"]
    checked = check(
        tmp_path,
        "r.csv",
        csv_of(",", *[f"a,good,{who}" for who in [*same, "1230", "123.5"]], header="text,label,who"),
        OWNED,
    )
    assert len(set(checked.owners or ())) == 9
    assert "several spellings: 1 (lines 2, 3, 4, 5, 6 and 2 more)" in checked.notes["spellings"]


def test_notes_of_owners_and_texts(tmp_path: Path) -> None:
    owners = [f"{SECRET} {i}" for i in range(120)] + ["Unknown"] * 30 + ["  unknown", f"{SECRET.upper()}  7"]
    text = csv_of(
        ",", *[f"{'long ' * 9 if i == 4 else 'a'},good,{who}" for i, who in enumerate(owners)], header="text,label,who"
    )
    notes = check(tmp_path, "r.csv", text, OWNED, too_long=lambda texts: [len(each) > 20 for each in texts]).notes
    assert notes.keys() == {"spellings", "large_owners", "long"}
    assert "2 (lines 9 and 153; lines 122 and 152)" in notes["spellings"]
    assert "1 (up to 30; the median has 1)" in notes["large_owners"]
    assert "1 (line 6)" in notes["long"]
    alone = check(tmp_path, "r.csv", csv_of(",", f"{SECRET},good", f"{SECRET},bad")).notes
    assert alone.keys() == {"repeated", "few_owners"}
    assert SECRET not in f"{notes} {alone}"


def test_documents_that_answers_leave_out_are_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter is a token: 78 of context leave 14 for a document, as a server with this model finds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "local_embeddings", lambda: DeterministicFakeEmbedding(size=2))
    table = TableModel(lambda *_: [0.0], "a", context=78)
    monkeypatch.setattr(documents, "TransformersLogits", lambda name: table)
    (tmp_path / "texts.csv").write_text("text\n" + "\n".join(["a" * 14, SECRET, f"{SECRET} and more", "b"] * 30))
    sizes = "--model w.gguf --question-tokens 10 --max-tokens 14 --json --output-key".split()
    code, out, _ = run(capsys, "check-data", "texts.csv", *sizes, "")
    assert code == 0
    assert "60 (lines 3, 4, 7, 8" in json.loads(out)["notes"]["documents"]
    assert SECRET not in out


# -- the command, and the others ---------------------------------------------------------------------------------------


class Counting(DeterministicFakeEmbedding):
    """An embedding model that counts texts."""

    seen: list[str] = []  # noqa: RUF012

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.seen.extend(texts)
        return super().embed_documents(texts)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    model = Counting(size=8, seen=[])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "local_embeddings", lambda: model)
    return model


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_shows_what_it_found_and_no_text(tmp_path: Path, model: Embeddings, capsys: Any) -> None:
    rows = [f"{SECRET} {i},{'good' if i % 3 else 'bad'},{SECRET} {i // 2}" for i in range(20)]
    (tmp_path / "r.csv").write_text(csv_of(";", *rows, "x,,y", header="text,label,who"))
    asked = ["check-data", "r.csv", "--owner-key", "who", "--labels", "good,bad,odd"]
    code, out, err = run(capsys, *asked)
    assert (code, err) == (1, "")
    shown = " ".join(out.split())
    for words in ("CSV with semicolons, UTF-8", "records 21, of 10 owners", "good 13", "odd 0", "line 22"):
        assert words in shown
    code, told, _ = run(capsys, *asked, "--json")
    facts = json.loads(told)
    assert facts["labels"] == {"good": 13, "bad": 7, "odd": 0}
    assert facts["faults"] == [{"problem": "nothing under 'label'", "lines": [22]}]
    assert (facts["records"], facts["usable"], facts["owners"]) == (21, 20, 10)
    assert SECRET not in out + told
    (tmp_path / "texts.csv").write_text(csv_of(",", *[f"a{i},{SECRET} {i}" for i in range(4)]))
    code, out, _ = run(capsys, "check-data", "texts.csv")
    assert code == 0
    assert "4 different ones" in out
    assert SECRET not in out, "outputs that may be texts are not listed as labels"


def fit(*more: str) -> list[str]:
    always = "fit --data r.csv --labels good,bad --epsilon 8 --delta 1e-3 --fits 9 --name r --owners 100 --json"
    return [*always.split(), "--output", "h.npz", *more]


@pytest.mark.filterwarnings("ignore:.*owners")
def test_commands_refuse_and_skip_as_the_check_does(tmp_path: Path, model: Embeddings, capsys: Any) -> None:
    rows = [f"{SECRET} {i},{'good' if i % 2 else 'bad'}" for i in range(120)]
    (tmp_path / "r.csv").write_text(csv_of(",", *rows, f"{SECRET},"))
    code, out, err = run(capsys, *fit())
    assert code == 1
    assert "1 of 121 records of 'r.csv' cannot be used: nothing under 'label' (line 122)" in err
    code, out, err = run(capsys, *fit("--skip-bad"))
    assert code == 0
    assert "records that cannot be used are left out; --private-notes or check-data counts them" in err
    assert not re.search(r"\b121\b", out + err), "counts of the file are for an operator who asks"
    (tmp_path / "h.npz").unlink()
    code, out, told = run(capsys, *fit("--skip-bad", "--private-notes", "--report", "r.json"))
    assert "1 of 121 records of 'r.csv' cannot be used" in told
    assert not re.search(r"\b121\b", out)
    assert json.loads((tmp_path / "r.json").read_text())["records"] == 120
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o600
    assert SECRET not in out + err + told


@pytest.mark.parametrize(
    "command",
    [
        "fit --labels good,bad --output h.npz",
        "answer --mode label-vote --labels good,bad --question x --threshold 0.1 --eligible 4",
        "table --topics text --values a,b --output t.json",
        "topics",
        "synthesize --inputs r.txt --output o.jsonl --input-key text --output-key label",
    ],
)
def test_a_command_without_an_owner_key_says_once_that_the_bound_is_a_records(
    command: str, tmp_path: Path, model: Embeddings, capsys: Any
) -> None:
    """Each command reads the file, says so, and refuses the ledger. Names of a header are shown; of JSON lines, whose
    fields are the records', none."""
    (tmp_path / "r.txt").write_text("one\n")
    rows = [{"customer": f"p{i // 2}", "text": f"text {i}", "label": ("good", "bad")[i % 2]} for i in range(8)]
    (tmp_path / "r.csv").write_text(csv_of(",", *[",".join(row.values()) for row in rows], header=",".join(rows[0])))
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = {}
    for name, *owner in (("r.csv",), ("r.jsonl",), ("r.csv", "--owner-key", "customer"), ("r.csv", "--owner-key", "")):
        more = f"--data {name} --epsilon 1 --store {len(told)}.db --ledger nothing://x"
        code, _, err = run(capsys, *command.split(), *more.split(), *owner)
        *said, refused = err.splitlines()
        assert (code, "not on 'nothing'" in refused) == (1, True)
        told[name, *owner] = said
    (of_csv,), (of_json,), *others = told.values()
    assert others == [[], []]
    for words in ("'r.csv': without --owner-key", "for each record, not for each person", "--owner-key ''"):
        assert words in of_csv
    assert "'customer', 'text', 'label'" in of_csv
    assert "customer" not in of_json
    assert "`dpicl check-data` shows the columns" in of_json


@pytest.mark.filterwarnings("ignore:.*owners")
def test_a_kept_store_follows_its_file_and_embeds_only_what_is_new(
    tmp_path: Path, model: Counting, capsys: Any
) -> None:
    rows = [f"text {i},{'good' if i % 2 else 'bad'},p{i // 2}" for i in range(200)]
    header = "text,label,who"
    (tmp_path / "r.csv").write_text(csv_of(",", *rows, header=header))

    def follow() -> tuple[int, str, str]:
        (tmp_path / "h.npz").unlink(missing_ok=True)
        return run(capsys, *fit("--store", "s.db", "--owner-key", "who", "--private-notes"))

    assert follow()[0] == 0
    assert model.seen[1:] == [f"text {i}" for i in range(200)], "after the word that shows its dimension"
    model.seen.clear()
    assert "up to date" in follow()[2]
    assert len(model.seen) == 1, "one text shows that the model is still the same"
    assert len(ExemplarStore.load("s.db", model).released_once) == 1

    served = ExemplarStore.load("s.db", model)  # as a server has it open meanwhile
    changed = ["new text,good,p0", "text 1,bad,p0", *rows[2:198]]  # a text, a label, two records gone
    (tmp_path / "r.csv").write_text(csv_of(",", *changed, header=header))
    model.seen.clear()
    assert "2 records came, 4 went, 1 texts were embedded" in follow()[2]
    assert model.seen[1:] == ["new text"]
    store = ExemplarStore.load("s.db", model)
    assert (len(store), store.owner_count, len(store.released_once)) == (198, 99, 1)
    assert (len(served), served.owner_count) == (198, 99)

    assert run(capsys, "forget", "--store", "s.db", "--owner", "p7")[0] == 0
    assert "2 records of forgotten owners are left out" in follow()[2]
    store = ExemplarStore.load("s.db", model)
    assert (len(store), "p7" in store.owners) == (196, False), "the file does not bring a forgotten owner back"


def test_a_kept_store_refuses_another_model_other_keys_and_other_data(
    tmp_path: Path, model: Counting, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.csv").write_text(csv_of(",", *[f"text {i},good" for i in range(9)]))
    records = [{"text": f"text {i}", "label": "good"} for i in range(9)]
    ExemplarStore.from_records(records, model, input_key="text", output_key="label").save("s.db")
    for size in (8, 4):

        class Other(DeterministicFakeEmbedding):
            def embed_documents(self, texts: list[str]) -> list[list[float]]:
                return super().embed_documents([f"{text}!" for text in texts])

        monkeypatch.setattr(local, "local_embeddings", lambda size=size: Other(size=size))
        code, _, err = run(capsys, *fit("--store", "s.db"))
        assert (code, "this embedding model" in err) == (1, True)
    monkeypatch.setattr(local, "local_embeddings", lambda: model)
    code, _, err = run(capsys, *fit("--store", "s.db", "--owner-key", "text"))
    assert (code, "owner_key=None" in err) == (1, True)
    (tmp_path / "r.csv").write_text(csv_of(",", *[f"other {i},good" for i in range(9)]))
    code, _, err = run(capsys, *fit("--store", "s.db"))
    assert (code, "lacks more than half of its texts" in err) == (1, True)
    assert exemplars_of(ExemplarStore.load("s.db", model)) == records
