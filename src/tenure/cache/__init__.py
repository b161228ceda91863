"""What is resident, and whose: the KV cache as a pure core of integers and frozen records."""

from tenure.cache.history import History
from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Grant, Lease, LeaseId
from tenure.cache.plan import Ask, Head, Match, Plan, Shortfall

__all__ = ["Ask", "Grant", "Head", "History", "KvCache", "Lease", "LeaseId", "Match", "Plan", "Shortfall"]
