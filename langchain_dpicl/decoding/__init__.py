"""Private answers token by token: a language model's logits in, one drawn token after the other out (DPS-MOZO)."""

from langchain_dpicl.decoding.model import Demonstration, Logits, LogitsModel, LogitsSession
from langchain_dpicl.decoding.sampler import DPSampler
from langchain_dpicl.decoding.template import DemonstrationTemplate

__all__ = ["DPSampler", "Demonstration", "DemonstrationTemplate", "Logits", "LogitsModel", "LogitsSession"]
