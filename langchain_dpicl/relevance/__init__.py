"""The threshold of the relevance gate: from public texts for nothing, or from the store for a part of a budget.

A selector's threshold is public, so it must not be read off the private exemplars. Ways to a good one:

- `suggest_threshold` sees public or synthetic queries and texts alone, which resemble the real ones. It costs nothing.
- `ShareThreshold` is one for each query, from public texts alone too.
- `release_threshold` looks at the store, and draws a threshold of a public grid by the exponential mechanism.
"""

from langchain_dpicl.relevance.release import ReleasedThreshold, release_threshold
from langchain_dpicl.relevance.share import ShareThreshold
from langchain_dpicl.relevance.suggest import SuggestedThreshold, suggest_threshold

__all__ = ["ReleasedThreshold", "ShareThreshold", "SuggestedThreshold", "release_threshold", "suggest_threshold"]
