"""Private answers token by token: a language model's logits in, one drawn token after the other out (DPS-MOZO)."""

from langchain_dpicl.decoding.backends.server_model import ServerLogits
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import Demonstration, DemonstrationTemplate, Logits, LogitsModel, LogitsSession
from langchain_dpicl.decoding.sampler import DPSampler
from langchain_dpicl.decoding.synthesis import Demonstrations, Made, synthesize_demonstrations

__all__ = [
    "DPSampler",
    "Demonstration",
    "DemonstrationTemplate",
    "Demonstrations",
    "Logits",
    "LogitsModel",
    "LogitsSession",
    "Made",
    "ServerLogits",
    "TransformersLogits",
    "synthesize_demonstrations",
]
