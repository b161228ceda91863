"""Whose turn it is: between tenants by what they were served, within a tenant by arrival and priority.

Between tenants: the Virtual Token Counter (arXiv 2401.00588). Each tenant's counter grows by what it is served, divided
by its weight, and the lowest goes first; one that had nothing to do starts at the lowest of the busy ones, so that
idling saves nothing up. Among those less than a quantum apart the one whose next prompt is held most goes first (the
locality of DLPM, arXiv 2501.14312). When only one tenant has work it gets everything.

Within a tenant: a request's place is fixed when it arrives: its arrival time plus PATIENCE_S for each step of priority.
So a request of the next better priority goes first only when it came less than PATIENCE_S later, and whoever waits is
sure to be at the head one day, however many better ones keep coming. A paused sequence keeps the place it arrived with,
which puts it in front of everything that came later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from tenure.sched.sequence import Phase, Sequence
from tenure.tenants import Tenant, Tenants

PATIENCE_S = 30.0
MAX_PRIORITY = 100
"""Priorities beyond ± this are taken as this: it bounds how long the head of the queue can be overtaken."""
DECODE_COST = 2.0
"""A generated token in units of a computed prompt token."""
BLOCK_SECOND_COST = 1.0
"""A block leased for a second in the same units."""
QUANTUM = 512.0
"""Counters closer than this count as equal when locality has a say."""


def order(arrived: float, priority: int) -> float:
    """Place in the queue of a request that arrived at `arrived` seconds; lower `priority` runs first, as in vLLM."""
    return arrived + PATIENCE_S * max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


class Account:
    """A tenant at work: its queue, its requests that have started, and what it was served.

    `counter` is that by weight, lifted when it comes back from idling.
    """

    def __init__(self, name: str, tenant: Tenant) -> None:
        self.name = name
        self.tenant = tenant
        self.queue: list[tuple[float, int, Sequence]] = []
        self.new = 0
        """Sequences never started, and their prompt tokens; the prompt counts once for n."""
        self.new_tokens = 0
        self.started = 0
        """Living requests that have started."""
        self.running = 0
        """Sequences that run."""
        self.service = 0.0
        self.counter = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.running > 0

    def charge(self, units: float) -> None:
        """It was served so much; less than 0 takes back what was charged in advance."""
        self.service += units
        self.counter += units / self.tenant.weight

    def may_start(self, seq: Sequence) -> bool:
        """Whether its limit on concurrent requests lets this one start."""
        most = self.tenant.max_concurrent
        return most is None or seq.job.started is not None or self.started < most


class WaitingQueue:
    """All sequences that wait, by tenant. `new` and `new_tokens` count those never started."""

    def __init__(self, tenants: Tenants | None = None) -> None:
        self._tenants = Tenants() if tenants is None else tenants
        self.accounts: dict[str, Account] = {}
        for tenant in self._tenants.tenants:  # from the start: their limits bind the first request as well
            self.account(tenant.name)

    def __len__(self) -> int:
        return sum(len(account.queue) for account in self.accounts.values())

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant, each in order."""
        return (item[2] for account in self.accounts.values() for item in account.queue)

    @property
    def new(self) -> int:
        return sum(account.new for account in self.accounts.values())

    @property
    def new_tokens(self) -> int:
        return sum(account.new_tokens for account in self.accounts.values())

    def account(self, name: str) -> Account:
        """The account of the tenant called `name`."""
        found = self.accounts.get(name)
        if found is None:
            found = self.accounts[name] = Account(name, self._tenants.of(name))
        return found

    def add(self, seq: Sequence) -> None:
        account = self.account(seq.tenant)
        if not account.busy:
            busy = [other.counter for other in self.accounts.values() if other.busy]
            account.counter = max(account.counter, min(busy, default=0.0))
        insort(account.queue, (seq.job.order, int(seq.id), seq))
        self._count(account, seq, 1)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the queue, before its phase changes."""
        account = self.account(seq.tenant)
        at = bisect_left(account.queue, (seq.job.order, int(seq.id)))
        if at == len(account.queue) or account.queue[at][2] is not seq:
            raise ValueError(f"sequence {seq.id} is not in the queue")
        del account.queue[at]
        self._count(account, seq, -1)

    def charge(self, running: Iterable[Sequence], seconds: float) -> None:
        """A step was computed: charge for its decode rows, and for what was held since the step before. Prefill is
        charged in advance, when a sequence starts."""
        for seq in running:
            held = 0 if seq.lease is None else len(seq.lease.blocks)
            decodes = DECODE_COST if seq.phase is Phase.DECODE else 0.0
            self.account(seq.tenant).charge(BLOCK_SECOND_COST * held * seconds + decodes)

    def turns(self, held: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Each waiting sequence in turn. The one given may be removed, and accounts charged, before the next is asked
        for. `held`: tokens of a sequence that need not be computed."""
        places = {account: 0 for account in self.accounts.values() if account.queue}
        while places:
            account = self._lowest(places, held)
            seq = account.queue[places[account]][2]
            yield seq
            at = places[account]
            if at < len(account.queue) and account.queue[at][2] is seq:
                places[account] = at = at + 1
            if at >= len(account.queue):
                del places[account]

    def _lowest(self, places: dict[Account, int], held: Callable[[Sequence], int]) -> Account:
        if len(places) == 1:
            return next(iter(places))
        lowest = min(account.counter for account in places)
        near = [account for account in places if account.counter < lowest + QUANTUM]
        if len(near) == 1:
            return near[0]
        return max(near, key=lambda account: (held(account.queue[places[account]][2]), -account.counter))

    def _count(self, account: Account, seq: Sequence, sign: int) -> None:
        if seq.phase is Phase.WAITING:
            account.new += sign
            if seq.index == 0:
                account.new_tokens += sign * seq.job.prompt_len
