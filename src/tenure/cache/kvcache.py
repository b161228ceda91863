"""The façade of the cache: what is resident, and whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from tenure.cache import audit, keys
from tenure.cache.find import Finder
from tenure.cache.ghosts import Ghosts
from tenure.cache.lease import Grant, Held, Lease, LeaseId
from tenure.cache.leaves import Leaves
from tenure.cache.ledger import Ledger
from tenure.cache.plan import Ask, Goes, Head, Lost, Match, Plan, Shortfall, Takes
from tenure.cache.plans import Plans
from tenure.cache.pool import STORED, BlockPool, SlabPool
from tenure.cache.radix import NO_BLOCK, Node, Part, RadixIndex
from tenure.cache.recode import Recoded, RecodePlan, Recoder
from tenure.cache.supply import Supply
from tenure.cache.windows import Windows
from tenure.errors import StalePlan
from tenure.events import BlockGone, BlockMerged, BlockReused, BlockStored, CacheCleared, FactLog, WindowGone
from tenure.policy.base import EvictionPolicy
from tenure.spec import UNBOUNDED, ArenaLayout, Codec
from tenure.types import BlockId, CopyOp, Fate, Key, KindCounts, PoolCounts, Scope, Token

DEVICE = "device"


class KvCache:
    """A pool of blocks, an index of what they hold, and the leases on them.

    Asks (`match`, `plan`) change nothing; `apply`, `commit`, `release` and `drop_unleased` are the only mutators. One
    thread owns it. A request asks again only after `epoch` has moved: until then the answers stay the same.
    """

    def __init__(
        self,
        pool: int | ArenaLayout,
        block_tokens: int,
        *,
        codec: Codec,
        eviction: EvictionPolicy,
        facts: FactLog,
        ghosts: Ghosts | None = None,
        shared: Sequence[Sequence[Token]] = (),
    ) -> None:
        """`pool`: how many blocks there are, or how an arena is cut for them; of `block_tokens` tokens each, both at
        least 1. The log's facts teach `eviction`; `ghosts` remember what was lost; `shared` prefixes are everyone's."""
        if block_tokens < 1:
            raise ValueError(f"a block needs at least one token, not {block_tokens}")
        self._size = block_tokens
        self._eviction = eviction
        self._facts = facts
        self._pool = BlockPool(pool, codec.name) if isinstance(pool, int) else SlabPool(pool)
        self._tails = codec.head_reusable or self.staged
        """Whether heads of blocks are reused: of those whose values are unquantised."""
        self._index = RadixIndex(block_tokens)
        self._roots = keys.Roots(block_tokens, shared)
        self._owners: dict[Key, str] = {}
        """The tenants of the roots that have blocks."""
        self.ghosts = ghosts if ghosts is not None else Ghosts(0)
        self._leaves = Leaves(eviction, block_tokens)
        self._windows = Windows(self._pool, self._leaves, block_tokens)
        self._leases: dict[LeaseId, Held] = {}
        self._find = Finder(self._index, self._roots, self.ghosts)
        self._supply = Supply(self._pool, self._leaves, self._leases, block_tokens)
        self._promises: dict[Key, LeaseId] = {}
        self._plans = Plans(self._pool, self._find, self._supply, self._windows, self._promises, tails=self._tails)
        self._usable = self._plans.usable
        self._recoder = Recoder(self._pool, self._index, self._supply, self._windows, self._leases, self._promises)
        self._ids = count(1)
        self._epoch = 0
        self.ledger = Ledger()
        self.ended: Counter[str] = Counter()
        """Leases released, by the reason given."""
        facts.listen(self.ledger.learn)
        facts.listen(eviction.learn)

    # ---- ask

    @property
    def epoch(self) -> int:
        """Moves with every change of what is held, promised or leased."""
        return self._epoch

    @property
    def block_tokens(self) -> int:
        return self._size

    @property
    def staged(self) -> bool:
        """Whether open blocks are staged apart from full ones."""
        return self._pool.staging != STORED

    @property
    def longest(self) -> int:
        """Blocks that one sequence can ever have: no end when all layers have windows, and those fit."""
        seen = self._pool.groups[0].held(UNBOUNDED, self._size)
        return UNBOUNDED if seen <= self._pool.total else self._pool.total

    def counts(self) -> PoolCounts:
        return self._pool.counts()

    def by_codec(self) -> tuple[KindCounts, ...]:
        """Blocks in use, by how they are stored."""
        return self._pool.by_kind()

    def codecs(self, lease: Lease, computed: int, tokens: int) -> dict[str, int]:
        """How the tokens of a sequence are held, in tokens by codec; what is not computed yet counts as open."""
        return self._supply.codecs(lease, computed, tokens)

    def bytes_of(self, blocks: Sequence[BlockId | None], stored: int) -> dict[str, int]:
        """What blocks take, by codec, where one that is stored as it came takes `stored` bytes."""
        sizes = self._pool.layout.block_bytes if isinstance(self._pool, SlabPool) else (stored,)
        kinds = Counter(self._pool.kind(block) for block in blocks if block is not None and block != NO_BLOCK)
        return {self._pool.codecs[kind]: n * sizes[kind] for kind, n in kinds.items()}

    def match(self, scope: Scope, tokens: Sequence[Token], *, exact: bool = False) -> Match:
        """The longest reusable prefix of all of `tokens`. Stamps nothing."""
        return self._plans.match(scope, tokens, exact)

    def plan(self, ask: Ask, now: float) -> Plan | Shortfall:
        """How to give what is asked, or why it cannot be given.

        For a new sequence reuse is matched over tokens[:-1]: the last token is always computed, for its logits.
        """
        if ask.lease is None:
            return self._plans.start(self._epoch, ask, now)
        return self._plans.growth(self._epoch, ask.lease, len(self._held(ask.lease).nodes), ask.room, now)

    def tip(self, lease: Lease) -> Key | None:
        """The key of its last full block that is shareable; None when there is none."""
        nodes = self._held(lease).nodes
        return nodes[-1].key if nodes else None

    def lost(self, scope: Scope, tokens: Sequence[Token], matched: int) -> Lost:
        """What of tokens[matched:] was held once, as far as the ghosts know; the newest token is always computed."""
        path, _ = self._find.walk(scope, tokens, len(tokens) - 1)
        again = self._size * len(path) - max(matched, self._size * self._windows.whole(path))
        if again > 0 and self._windows:
            return Lost(again, "window", None, older=False)
        return self._find.lost(scope, tokens, matched, self._plans.why_not)

    def recodable(self, lease: Lease) -> int:
        """Blocks of a lease that could be stored in fewer bits, as far as that is known without trying."""
        return self._recoder.able(self._held(lease))

    def plan_recode(self, lease: Lease, codec: str, n: int, now: float) -> RecodePlan | Shortfall:
        """How to make room of about `n` stored blocks by storing the oldest of a lease in `codec`; see `Recoder`."""
        return self._recoder.plan(self._epoch, self._held(lease), codec, n, now)

    def weight(self, lease: Lease) -> int:
        """Blocks of the first group of layers that take as much room as what a lease holds."""
        return self.weigh(len(table) - table.count(NO_BLOCK) for table in lease.tables)

    def weighs(self, blocks: int) -> int:
        """The same of a sequence that has come to so many blocks."""
        return self.weigh(group.held(blocks, self._size) for group in self._pool.groups)

    def weigh(self, blocks: Iterable[int]) -> int:
        """The same of so many blocks of each group."""
        return self._supply.weight(Takes(tuple(blocks), 0))

    def seen(self, keys: Sequence[Key]) -> list[Sequence[Key]]:
        """Of a path of blocks, those of each group of layers that who goes on behind it sees."""
        return [keys[first:] for first in self._windows.seen(self._size * len(keys))]

    def tokens_of(self, blocks: Sequence[Key]) -> int:
        """How many tokens these blocks hold."""
        return sum(len(self._index.nodes[key].tokens) for key in blocks)

    def leaked(self) -> int:
        """Blocks that are neither free, cached nor of any lease; 0 unless there is a bug."""
        private = sum(len(held.private()) for held in self._leases.values())
        cached = sum(len(node.blocks) - node.blocks.count(NO_BLOCK) for node in self._index.nodes.values())
        return self._pool.used - cached - private

    def freed_by(self, lease: Lease) -> int:
        """Blocks that only this lease holds, of the first group of layers: what its release would make free or
        evictable."""
        own = lease.open is not None and self._pool.refs[lease.open] == 1
        return own + sum(self._pool.refs[block] == 1 for block in lease.blocks if block != NO_BLOCK)

    def check(self) -> None:
        """Verify every invariant; raises Corrupt with a sentence naming the one that does not hold."""
        audit.check_index(self._index)
        audit.check_pool(self._pool, self._index, self._leases.values())
        audit.check_leaves(self._leaves, self._pool, self._index, self._usable)
        audit.check_leases(self._leases, self._promises, self._size)
        audit.check_books(self.ledger, DEVICE, len(self._index.nodes))

    # ---- do

    def apply(self, plan: Plan, now: float) -> Grant:
        """Carry out a plan: all of it, or none (StalePlan when the epoch has moved)."""
        if plan.epoch != self._epoch:
            raise StalePlan(f"planned at epoch {plan.epoch}, applied at {self._epoch}")
        self._epoch += 1
        nodes = [self._index.nodes[key] for key in plan.reused]
        source = self._index.nodes[plan.head.key] if plan.head else None
        self._make_room(plan.goes, "room", now)
        stored, opened = self._supply.take(plan.takes)
        if plan.lease is not None:
            held = self._leases[plan.lease.id]
            tables = tuple((*had, *new) for had, new in zip(plan.lease.tables, stored, strict=True))
            held.lease = replace(plan.lease, tables=tables, room=self._supply.room(tables))
            return Grant(held.lease, ())
        seen = self._windows.seen(plan.reused_tokens)
        for i, node in enumerate(nodes):
            self._reuse(node, len(node.tokens), now)
            self._windows.hold(node, i, seen, now)
        tail: Node | None = None
        copies: tuple[CopyOp, ...] = ()
        if plan.head and source:
            into = opened or [new[0] for new in stored if new]
            tail, copies = self._take_head(plan.head, source, into, len(nodes), now)
        tables = self._windows.tables(nodes, seen, stored, tail if tail and not self.staged else None)
        if tail and self.staged:
            opened = tail.blocks
        lease = Lease(
            LeaseId(next(self._ids)),
            plan.scope,
            tables,
            plan.reused_tokens,
            self._size * len(nodes),
            self._supply.room(tables),
            opened[0] if opened else None,
            plan.exact,
        )
        self._leases[lease.id] = Held(lease, nodes, tail, set(plan.promises), seen)
        self._promises.update(dict.fromkeys(plan.promises, lease.id))
        return Grant(lease, copies)

    def commit(self, lease: Lease, tokens: Sequence[Token], computed: int, now: float, *, tail: bool = False) -> Lease:
        """Make shareable what is computed: `tokens` are all of the sequence, the first `computed` have valid KV.

        Full blocks fulfil their promises; one that is held already is given back and the held one leased instead,
        so always go on with the lease returned. With `tail` the open block's computed head is published too
        (append-only: the owner goes on writing behind it). Costs nothing when no block became full.
        """
        held = self._held(lease)
        if computed > len(tokens) or computed > lease.room:
            raise ValueError(f"{computed} computed of {len(tokens)} tokens in {len(lease.blocks)} blocks")
        if computed >= lease.committed_tokens + self._size:
            self._commit_full(held, tokens, computed, now)
        if tail and computed > held.lease.committed_tokens:
            self._commit_tail(held, tokens, computed, now)
        return held.lease

    def hold(self, scope: Scope, tokens: Sequence[Token], now: float) -> Lease | None:
        """A lease on the full blocks that hold `tokens`, of which nothing more is computed; None when there are none.
        Release it with its own `committed_tokens`."""
        path, _ = self._find.walk(scope, tokens, len(tokens))
        path = path[: self._windows.whole(path)]
        if not path:
            return None
        self._epoch += 1
        held = self._size * len(path)
        seen = self._windows.seen(held)
        for i, node in enumerate(path):
            self._windows.hold(node, i, seen, now)
        tables = self._windows.tables(path, seen, [[] for _ in seen], None)
        lease = Lease(LeaseId(next(self._ids)), scope, tables, held, held, held, exact=True)
        self._leases[lease.id] = Held(lease, path, None, set(), seen)
        return lease

    def let_go(self, scope: Scope, tokens: Sequence[Token], now: float, by: str, reason: str) -> int:
        """Drop what of `tokens` nobody leases and no other prompt goes on from; the number of blocks."""
        path, head, _ = self._plans.reach(scope, tokens, len(tokens), all_held=True)
        self._epoch += 1
        tail = [self._index.nodes[head.key]] if head and head.whole else []
        dropped = 0
        for node in (*tail, *reversed(path)):
            if node.kids or node.holds:
                break
            self._evict(node, Fate.DROPPED, by, reason, now)
            dropped += 1
        return dropped

    def apply_recode(self, plan: RecodePlan, by: str, now: float) -> Recoded:
        """Carry out a plan to recode: all of it, or none (StalePlan when the epoch has moved)."""
        if plan.epoch != self._epoch:
            raise StalePlan(f"planned at epoch {plan.epoch}, applied at {self._epoch}")
        self._epoch += 1
        self._make_room(plan.goes, "room to recode", now)
        made, renamed = self._recoder.apply(plan)
        for node, key, block in renamed:
            self._told_recoded(node, key, block, by, now)
        return made

    def _told_recoded(self, node: Node, key: Key, block: BlockId, by: str, now: float) -> None:
        owner, idle, age = self._owner(node), now - node.last_used, now - node.created
        now_in = node.blocks[0]
        reason = f"recoded to {self._pool.codec(now_in)}" if block != now_in else "stands on a recoded block"
        self._facts.emit(BlockGone(now, key, block, DEVICE, Fate.RECODED, by, reason, 0, idle, age, tenant=owner))
        self._told_stored(node, now)

    def release(self, lease: Lease, tokens: Sequence[Token], computed: int, now: float, why: str) -> None:
        """Commit (tail included), then give the lease back; what is shareable stays cached, evictable.

        `computed` below `lease.committed_tokens` takes back: the KV from there on has proved bad (non-finite), so
        those blocks, and all that stands on them, go as CORRUPT, except while others lease them. `why` is counted in
        `ended`.
        """
        bad = computed < lease.committed_tokens
        if not bad:
            lease = self.commit(lease, tokens, computed, now, tail=True)
        held = self._held(lease)
        self._epoch += 1
        self.ended[why] += 1
        del self._leases[lease.id]
        for key in held.promised:
            del self._promises[key]
        shared = held.shared()
        private = held.private()
        for block in private:
            self._pool.unhold(block)
        self._pool.give(private)
        for i in range(len(shared) - 1, -1, -1):
            self._windows.unhold(shared[i], i, held.seen, now)
        if bad:
            self._revoke(shared[computed // self._size :], why, now)
        elif held.tail and held.tail.parent and self._index.is_head(held.tail.parent, held.tail.tokens, self._usable):
            self._evict(held.tail, Fate.DUPLICATE, "cache", "a longer block holds it", now)

    def drop_unleased(self, now: float) -> int:
        """Evict everything nobody leases; the number of blocks dropped."""
        self._epoch += 1
        idle = [node for node in self._index.nodes.values() if not node.holds]
        for node in sorted(idle, key=lambda node: -node.depth):
            self._evict(node, Fate.DROPPED, "operator", "reset", now)
        for node in list(self._index.nodes.values()):
            for part in node.parts:
                if part in self._leaves:
                    self._shed(part, "operator", "reset", now)
        self._facts.emit(CacheCleared(now, len(idle)))
        return len(idle)

    # ---- how

    def _held(self, lease: Lease) -> Held:
        held = self._leases.get(lease.id)
        if held is None or held.lease is not lease:
            raise ValueError(f"lease {lease.id} was released, or this is not its newest receipt")
        return held

    def _take_head(
        self, head: Head, source: Node, into: Sequence[BlockId], i: int, now: float
    ) -> tuple[Node | None, tuple[CopyOp, ...]]:
        """The tail to take over as block i, or the copies of a head into the first blocks taken."""
        self._reuse(source, head.tokens, now)
        if head.whole:
            self._windows.hold(source, i, [0] * len(self._pool.groups), now)
            return source, ()
        self._windows.refresh(source)
        return None, tuple(CopyOp(had, new) for had, new in zip(source.blocks, into, strict=True))

    def _reuse(self, node: Node, tokens: int, now: float) -> None:
        self._facts.emit(BlockReused(now, node.key, DEVICE, tokens, now - node.last_used, tenant=self._owner(node)))
        node.last_used = now

    def _commit_full(self, held: Held, tokens: Sequence[Token], computed: int, now: float) -> None:
        self._epoch += 1
        self._withdraw(held, now)
        tables = [list(table) for table in held.lease.tables]
        scope = held.lease.scope
        common = self._roots.common(scope, tokens)
        for i in range(len(held.nodes), computed // self._size):
            ids = tuple(tokens[self._size * i : self._size * (i + 1)])
            parent = self._find.behind(scope, held.nodes, common)
            node, ours = self._index.child(parent, ids), [table[i] for table in tables]
            if node is None:
                node = self._store(scope, parent, ids, ours, now)
            else:
                self._merge(node, ours, now)
                for table, block in zip(tables, node.blocks, strict=True):
                    table[i] = block
            if node.key in held.promised:
                held.promised.discard(node.key)
                del self._promises[node.key]
            held.nodes.append(node)
        full = self._size * len(held.nodes)
        held.lease = replace(held.lease, tables=tuple(map(tuple, tables)), committed_tokens=full)
        if self._windows:
            held.lease = replace(held.lease, tables=self._windows.slide(held, full))

    def _commit_tail(self, held: Held, tokens: Sequence[Token], computed: int, now: float) -> None:
        start = held.lease.committed_tokens
        if not self._tails or (held.tail and len(held.tail.tokens) >= computed - start):
            return
        self._epoch += 1
        self._withdraw(held, now)
        ids = tuple(tokens[start:computed])
        scope = held.lease.scope
        parent = self._find.behind(scope, held.nodes, self._roots.common(scope, tokens))
        if self._index.child(parent, ids) is None and not self._index.is_head(parent, ids, self._usable):
            lease = held.lease
            blocks = [table[len(held.nodes)] for table in lease.tables] if lease.open is None else [lease.open]
            held.tail = self._store(scope, parent, ids, blocks, now)

    def _withdraw(self, held: Held, now: float) -> None:
        """Take back the lease's own tail, because its block now holds more."""
        if held.tail:
            self._forget(held.tail, Fate.DUPLICATE, "cache", "its owner wrote on", now)
            held.tail = None

    def _store(self, scope: Scope, parent: Node, ids: tuple[Token, ...], blocks: list[BlockId], now: float) -> Node:
        """Make leased blocks shareable."""
        node = self._index.attach(parent, keys.chain(parent.key, ids), ids, blocks, now)
        node.holds = 1
        self._windows.watch(node, now)
        if not parent.parent and parent.key not in self._owners:
            everyone = parent.key == self._roots.first(scope, 1)
            self._owners[parent.key] = "" if everyone else scope.tenant
        self.ghosts.forget(node.name)
        self._told_stored(node, now)
        self._outgrown(node, now)
        return node

    def _outgrown(self, node: Node, now: float) -> None:
        """An idle tail that a block continues goes, since its tokens are held twice now."""
        shorter = self._index.shorter(node, self._usable)
        if shorter and not shorter.holds:
            self._evict(shorter, Fate.DUPLICATE, "cache", "a longer block holds it", now)

    def _told_stored(self, node: Node, now: float) -> None:
        above = node.parent.key if node.parent and node.parent.parent else None
        block, ids, owner = node.blocks[0], node.tokens, self._owner(node)
        codec = self._pool.codec(block if block != NO_BLOCK else node.parts[0].block)
        self._facts.emit(BlockStored(now, node.key, above, block, DEVICE, codec, len(ids), ids, tenant=owner))

    def _merge(self, node: Node, ours: list[BlockId], now: float) -> None:
        """Two sequences computed the same block: lease the one that is held and give ours back, or let it have ours
        where a window had left it: then its head serves again."""
        self._windows.hold(node, 0, [block == NO_BLOCK for block in node.blocks], now)
        node.last_used = now
        for g, block in enumerate(ours):
            if node.blocks[g] == NO_BLOCK:
                node.blocks[g] = block
            else:
                self._pool.unhold(block)
                self._pool.give([block])
        self._facts.emit(BlockMerged(now, node.key, node.blocks[0], ours[0]))
        self._outgrown(node, now)

    def _make_room(self, goes: Goes, reason: str, now: float) -> None:
        by = self._eviction.name
        for key, group in goes.parts:
            parts = self._index.nodes[key].parts
            self._shed(next(part for part in parts if part.group == group), by, reason, now)
        for key in goes.victims:
            self._evict(self._index.nodes[key], Fate.DROPPED, by, reason, now)

    def _shed(self, part: Part, by: str, reason: str, now: float) -> None:
        """Let go of what a window had left."""
        node, block, window = part.node, part.block, self._pool.groups[part.group].window or 0
        self._leaves.discard(part)
        node.blocks[part.group] = NO_BLOCK
        self._pool.give([block])
        idle, owner = now - part.last_used, self._owner(node)
        self._facts.emit(WindowGone(now, node.key, block, window, by, reason, idle, tenant=owner))

    def _evict(self, leaf: Node, fate: Fate, by: str, reason: str, now: float) -> None:
        """Let go of an idle leaf and its block."""
        self._leaves.discard(leaf)
        self._forget(leaf, fate, by, reason, now)
        self._pool.give(block for block in leaf.blocks if block != NO_BLOCK)
        parent = leaf.parent
        if parent and parent.parent:
            self._windows.file(parent)

    def _revoke(self, nodes: list[Node], why: str, now: float) -> None:
        """Let go of what is bad, from the first of `nodes` that nobody leases: all behind an idle block is idle."""
        bad = [node for node in nodes if not node.holds][:1]
        for node in bad:
            bad.extend(node.kids)  # grows while it is read: the whole subtree, parents first
        for node in reversed(bad):
            self._evict(node, Fate.CORRUPT, "cache", why, now)

    def _forget(self, leaf: Node, fate: Fate, by: str, reason: str, now: float) -> None:
        """Drop a leaf from the index; the one way a key leaves the device."""
        assert leaf.parent is not None
        self._index.detach(leaf)
        lost = len(leaf.tokens) if fate.is_loss else 0
        if lost:
            self.ghosts.add(leaf.name, leaf.parent.name, leaf.tokens, fate, by, now)
        idle, age, owner = now - leaf.last_used, now - leaf.created, self._owner(leaf)
        block = leaf.blocks[0]
        self._facts.emit(BlockGone(now, leaf.key, block, DEVICE, fate, by, reason, lost, idle, age, tenant=owner))
        if leaf.scope_digest not in self._index.roots:
            del self._owners[leaf.scope_digest]

    def _owner(self, node: Node) -> str:
        """The tenant whose block it is; nobody for what belongs to all."""
        return self._owners[node.scope_digest]
