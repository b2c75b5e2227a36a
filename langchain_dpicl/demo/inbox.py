"""The demonstration's private data: the inbox of an invented clinic, written by this file's grammar.

The clinic sends each message to one of its desks. The desks carry the clinic's own names, which a small model cannot
guess from a message: without examples it is right as often as chance, so any better result comes from the private
examples. Every message holds private facts: a name, a date of birth, a condition, a drug, an amount.

Nothing here is copied from anywhere and no person is real. The seed makes the data, not the privacy: the same seed
gives the same inbox everywhere.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping

from langchain_dpicl.privacy.checks import whole

INPUT_KEY, OUTPUT_KEY, OWNER_KEY = "text", "label", "customer"

DESKS = {"pharmacy": "Flask", "billing": "Ledger", "appointments": "Porch"}
"""The work of each desk (no model sees this) and the name that the clinic gave it."""

DEMO_LABELS = tuple(DESKS.values())
DEMO_CALLS = 8
DEMO_THRESHOLD = 0.5
DEMO_ELIGIBLE = 0.2
DEMO_EXEMPLARS = 3
"""One owner per call, of those with a message that is similar to the question: about a fifth of all. A call sees the
patient's nearest three at most: on the demonstration's own questions, more votes are right than with one."""
DEMO_INSTRUCTION = ""
"""No instruction: with examples, a small base model does better without one."""
DEMO_CONTENT_FREE = (
    "Hello, this is Ana Lima, I have a question. Thanks!",
    "Ana Lima, born 3 May 1970: please call me back.",
)
"""They look like messages and ask for nothing that a desk does, so they calibrate better than "N/A".

Measured on 30 questions with 10 members of 4 examples, Gemma 3 270M: the plain vote is right for 93 % (with "N/A":
73 %; without calibration: 57 %; without examples: 23 %), and the winner is ahead by half the votes in the median.
"""

# Conditions with a drug that treats them.
_CONDITIONS = {
    "asthma": ("salbutamol", "fluticasone"),
    "diabetes": ("metformin", "insulin"),
    "high blood pressure": ("lisinopril", "amlodipine"),
    "depression": ("sertraline", "citalopram"),
    "epilepsy": ("levetiracetam", "lamotrigine"),
    "an underactive thyroid": ("levothyroxine",),
    "gout": ("allopurinol", "colchicine"),
    "migraine": ("sumatriptan", "propranolol"),
    "bipolar disorder": ("lithium", "quetiapine"),
    "psoriasis": ("methotrexate", "calcipotriol"),
    "heart failure": ("furosemide", "bisoprolol"),
    "HIV": ("dolutegravir", "lamivudine"),
    "hepatitis B": ("entecavir", "tenofovir"),
    "anxiety": ("buspirone", "escitalopram"),
    "an opioid addiction": ("buprenorphine", "naltrexone"),
    "arthritis": ("celecoxib", "naproxen"),
    "acid reflux": ("omeprazole", "famotidine"),
    "endometriosis": ("dienogest", "norethisterone"),
}

_FIRST = (
    "Ada Amir Anja Bela Boris Carmen Chidi Clara Dario Dina Elena Emeka Farah Felix Freya Gita Goran Hana Hugo Ilse "
    "Imran Ines Ivan Jana Jonas Kamal Karin Kofi Lara Leon Lina Luca Maeve Magda Marco Mina Nadia Nils Noor Olga Omar "
    "Paula Pedro Petra Quinn Rafael Rania Rosa Samir Selma Sven Tara Theo Uma Vera Viktor Wanda Yara Yusuf Zoe"
).split()
_LAST = (
    "Abara Adler Alvarez Baker Banerjee Berg Bianchi Bloom Brandt Castro Cohen Costa Dahl Diaz Dubois Eriksen Farouk "
    "Fischer Fontaine Garcia Grant Haddad Hansen Horvat Ibrahim Ito Jansen Kaplan Keller Khan Kovacs Kruger Larsen "
    "Lopez Mancini Marsh Mensah Moreau Nagy Novak Okafor Olsen Osman Park Petrov Quist Rahman Reyes Rossi Sato Silva "
    "Stern Tanaka Torres Ueda Varga Vogel Weiss Wolff Yilmaz Zeman"
).split()
_MONTHS = "January February March April May June July August September October November December".split()

_GRAMMAR: dict[str, tuple[str, ...]] = {
    # ------------------------------------------------------------------ repeat prescriptions and the pharmacy counter
    "pharmacy": ("{refill}", "{refill}", "{refill} {drugwhy}", "{supply} {refill_short}", "{pickup}", "{dose}"),
    "refill": (
        "Please {renew} my prescription for {drug}, {strength}.",
        "Could the doctor {renew} my {drug} prescription? I take {strength} {often}.",
        "I need a repeat prescription of {drug} tablets for my {condition}.",
        "Can I have another {months} of {drug} tablets on prescription?",
        "My {drug} prescription has expired, can you {renew} it and send it to the pharmacy?",
        "Requesting a refill of my {drug} tablets, {strength} {often}.",
    ),
    "supply": (
        "I have only {few} {drug} tablets left.",
        "My {drug} tablets run out on {day}.",
        "I lost my {drug} tablets on the train.",
        "My last box of {drug} tablets is nearly empty.",
    ),
    "refill_short": (
        "Please {renew} the prescription.",
        "Can I get a refill at the pharmacy?",
        "Please send a prescription to the pharmacy.",
        "I need the refill before {day}.",
    ),
    "pickup": (
        "The pharmacy says they never got the prescription for my {drug} tablets.",
        "The pharmacy gave me the wrong tablets instead of {drug}, please check the prescription.",
        "Is the prescription for my {drug} tablets ready for pickup at the pharmacy?",
        "The pharmacy is out of {drug} tablets, can you prescribe another brand for my {condition}?",
    ),
    "dose": (
        "The new {drug} tablets make me {symptom}. Should I take a lower dose than {strength}?",
        "I forgot two doses of my {drug} tablets, do I take them together?",
        "May I take my {drug} tablets with ibuprofen? The prescription does not say.",
        "Please change my prescription from tablets to liquid {drug}, I cannot swallow the tablets.",
    ),
    "drugwhy": (
        "I take the tablets for {condition}.",
        "The tablets are for my {condition}.",
        "The tablets help my {condition} a lot.",
        "I have {few} tablets left.",
    ),
    "renew": ("renew", "refill", "repeat", "reissue"),
    "often": ("every morning", "twice a day", "at night", "once a day"),
    "few": ("two", "three", "four", "five", "six"),
    "months": ("month", "two months", "three months"),
    "symptom": ("dizzy", "sleepy", "sick", "sweat at night", "shake"),
    # --------------------------------------------------------------------------------------------- bills and insurance
    "billing": ("{bill}", "{bill}", "{bill} {billwhy}", "{insurance}", "{paid} {pay_ask}", "{paying}"),
    "bill": (
        "I was charged ${amount} on my bill and I think the charge is wrong.",
        "The invoice of {day} says ${amount}, why was I charged so much?",
        "You charged my card ${amount} twice, please refund one payment.",
        "There is a charge of ${amount} on my bill that I do not understand.",
        "I got an invoice for ${amount} although my insurance paid the bill.",
        "Please correct my bill: the charge of ${amount} is not mine.",
    ),
    "billwhy": (
        "My insurance should pay for {condition}.",
        "Please refund the money to my card.",
        "Please send me a corrected invoice.",
        "I already made a payment of ${amount}.",
        "The charge is for {condition}, which my insurance covers.",
    ),
    "insurance": (
        "My insurance refused the claim of ${amount} for {condition}, please bill them again.",
        "Does the insurance cover the charge of ${amount} for {condition}, or do I pay the bill?",
        "I have a new insurance number, please send the ${amount} bill to them.",
        "The insurance wants an itemised invoice for the ${amount} charge before it pays.",
    ),
    "paid": (
        "I paid the ${amount} bill by card on {day}.",
        "My payment of ${amount} left my account on {day}.",
        "I made the payment of ${amount} last week.",
    ),
    "pay_ask": (
        "Why did I get another invoice?",
        "Please send a receipt for the payment.",
        "The bill still shows a balance due.",
        "Now you charge me a late fee on the invoice.",
    ),
    "paying": (
        "I cannot pay the ${amount} bill at once, may I pay it in monthly payments?",
        "I lost my job, can the payment of ${amount} on my bill wait?",
        "Please tell me the balance on my bill, I want to pay the ${amount} by card.",
        "Where do I send the payment for the ${amount} invoice?",
    ),
    # --------------------------------------------------------------------------------------------------- appointments
    "appointments": ("{book}", "{book}", "{book} {bookwhy}", "{move}", "{cannot} {move_short}", "{when}"),
    "book": (
        "I would like to book an appointment with Dr. {doctor} on {day}.",
        "Is there a free appointment with the doctor on {day} {time}?",
        "Please book me a visit with Dr. {doctor} {time}.",
        "Can I schedule an appointment for {day} {time}?",
        "I need to see Dr. {doctor}, what is the next available appointment?",
        "Do you have an opening for a visit on {day}?",
    ),
    "bookwhy": (
        "The visit is about my {condition}.",
        "My {condition} has become worse and I want to see the doctor.",
        "Any time {time} suits me for the visit.",
        "I want to talk to the doctor about {condition}.",
    ),
    "move": (
        "I have to cancel my appointment with Dr. {doctor} on {day}.",
        "Please move my appointment from {day} to {day}, {time} if possible.",
        "Can we reschedule my {day} appointment with Dr. {doctor} about {condition}?",
        "I am running late for my appointment with Dr. {doctor} on {day}, can I still come {time}?",
    ),
    "cannot": (
        "I cannot come to my visit on {day}.",
        "I missed my appointment with Dr. {doctor} on {day}.",
        "My train is cancelled, so I will miss the appointment on {day}.",
        "I have to work on {day} when I have my appointment.",
    ),
    "move_short": (
        "Can I reschedule it to {day}?",
        "Please book another time with the doctor.",
        "When is the next free appointment?",
        "Please cancel it and book me in {time}.",
    ),
    "when": (
        "When is my next appointment with Dr. {doctor}? I lost the card with the time.",
        "Please confirm my appointment on {day} {time} about {condition}.",
        "Can my visit with Dr. {doctor} on {day} be a video appointment?",
        "May my sister come with me to the appointment on {day} about {condition}?",
    ),
    "time": ("in the morning", "in the afternoon", "after 4 pm", "before 10 am", "around noon"),
    "doctor": ("Lindqvist", "Moss", "Achebe", "Pereira", "Tan"),
    # ------------------------------------------------------------------------------------------------------ everywhere
    "greeting": ("{name} here. ", "I am {name}. ", "{name}, born {birth}. ", "{name}: "),
    "signature": (" Thanks, {name}", " {name}, born {birth}", " {name}", " - {name}"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "{date}", "{date}"),
}
_SLOT = re.compile(r"\{(\w+)\}")


def generate_inbox(customers: int = 800, *, seed: int = 20260) -> list[dict[str, str]]:
    """Return about two and a half messages for each of ``customers``: records of ``customer``, ``text`` and ``label``.

    All messages of a customer have the same name, birthday and condition, and are on the customer's own matters. The
    same arguments give the same records. Raises `InvalidParameter` for fewer than one customer.
    """
    rng = random.Random(seed)
    records = []
    for number in range(1, whole("customers", customers) + 1):
        condition = rng.choice(list(_CONDITIONS))
        facts = {
            "name": f"{rng.choice(_FIRST)} {rng.choice(_LAST)}",
            "birth": f"{rng.randint(1, 28)} {rng.choice(_MONTHS)} {rng.randint(1938, 2006)}",
            "condition": condition,
            "drug": rng.choice(_CONDITIONS[condition]),
            "strength": f"{rng.choice((5, 10, 20, 25, 50, 100))} mg",
        }
        for _ in range(rng.choices((1, 2, 3, 4, 5, 6), weights=(26, 33, 20, 11, 6, 4))[0]):
            matter = rng.choice(list(DESKS))
            form = rng.choice(("{greeting}{%s}", "{%s}{signature}"))
            text = _written(rng, form % matter, facts)
            if rng.random() < 0.15:
                text = text.lower()
            records.append({OWNER_KEY: f"P{number:05d}", INPUT_KEY: text, OUTPUT_KEY: DESKS[matter]})
    return records


def demo_inbox(customers: int | None = None, questions: int = 60) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the private records of ``customers``, and one question of each of so many other customers.

    Default: 800 customers, or as many as the environment variable ``DPICL_DEMO_CUSTOMERS`` says, for a quick trial.
    """
    if customers is None:
        said = os.environ.get("DPICL_DEMO_CUSTOMERS", "800")
        customers = whole("DPICL_DEMO_CUSTOMERS", int(said) if said.isdecimal() else said)
    records = generate_inbox(whole("customers", customers) + whole("questions", questions))
    private = {f"P{number:05d}" for number in range(1, customers + 1)}
    others = {record[OWNER_KEY]: record for record in records if record[OWNER_KEY] not in private}
    return [record for record in records if record[OWNER_KEY] in private], list(others.values())


def _written(rng: random.Random, text: str, facts: Mapping[str, str]) -> str:
    """Replace every slot by the patient's fact, a fresh number or date, or one of the grammar's alternatives."""

    def fill(match: re.Match[str]) -> str:
        slot = match.group(1)
        if slot in facts:
            return facts[slot]
        if slot == "amount":
            return f"{rng.randint(18, 980)}.{rng.choice(('00', '50', '20', '75'))}"
        if slot == "date":
            return f"{rng.choice(_MONTHS)} {rng.randint(1, 28)}"
        return _written(rng, rng.choice(_GRAMMAR[slot]), facts)

    return _SLOT.sub(fill, text)
