"""Mathematics only: numbers in, numbers out. Nothing of LangChain is imported here."""

from langchain_dpicl.privacy.accountant import Accountant, Line, PLDAccountant, Schedule
from langchain_dpicl.privacy.explain import Calls, flip_probability
from langchain_dpicl.privacy.families import (
    ApproximateDP,
    BoundedRange,
    DiscreteGaussian,
    Gaussian,
    ProposeTestRelease,
    PureDP,
    lattice_multiplier,
)
from langchain_dpicl.privacy.lines import LineRequest, PlanLine
from langchain_dpicl.privacy.mechanisms import MECHANISMS, Mechanism, default_delta0
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.privacy.plan import PrivacyPlan
from langchain_dpicl.privacy.profile import Profile, compose
from langchain_dpicl.privacy.prv import PRVAccountant
from langchain_dpicl.privacy.rdp import RDPAccountant, RenyiFilter

__all__ = [
    "MECHANISMS",
    "Accountant",
    "ApproximateDP",
    "BoundedRange",
    "Calls",
    "DiscreteGaussian",
    "Gaussian",
    "Line",
    "LineRequest",
    "Mechanism",
    "PLDAccountant",
    "PRVAccountant",
    "PlanLine",
    "PrivacyPlan",
    "Profile",
    "ProposeTestRelease",
    "PureDP",
    "RDPAccountant",
    "Randomness",
    "RenyiFilter",
    "Schedule",
    "SecureRandomness",
    "compose",
    "default_delta0",
    "flip_probability",
    "lattice_multiplier",
]
