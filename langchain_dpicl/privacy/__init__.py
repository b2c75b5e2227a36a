"""Mathematics only: numbers in, numbers out. Nothing of LangChain is imported here."""

from langchain_dpicl.privacy.accountant import PLDAccountant, PRVAccountant, Verification
from langchain_dpicl.privacy.lines import LineRequest, PlanLine
from langchain_dpicl.privacy.mechanism import Mechanism
from langchain_dpicl.privacy.mechanisms import MECHANISMS, default_delta0
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.privacy.plan import CallCosts, PrivacyPlan
from langchain_dpicl.privacy.profile import (
    BoundedRange,
    DiscreteGaussian,
    Gaussian,
    Line,
    Profile,
    ProposeTestRelease,
    lattice_multiplier,
)
from langchain_dpicl.privacy.votes import flip_probability

__all__ = [
    "MECHANISMS",
    "BoundedRange",
    "CallCosts",
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
    "Randomness",
    "SecureRandomness",
    "Verification",
    "default_delta0",
    "flip_probability",
    "lattice_multiplier",
]
