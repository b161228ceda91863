"""The façade of the cache: what is resident, and whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from tenure.cache import audit, keys
from tenure.cache.lease import Grant, Held, Lease, LeaseId
from tenure.cache.leaves import Leaves
from tenure.cache.ledger import Ledger
from tenure.cache.plan import Ask, Head, Match, Plan, Shortfall
from tenure.cache.pool import BlockPool
from tenure.cache.radix import Node, RadixIndex
from tenure.errors import StalePlan
from tenure.events import BlockGone, BlockMerged, BlockReused, BlockStored, CacheCleared, FactLog
from tenure.policy.base import EvictionPolicy
from tenure.spec import Codec
from tenure.types import BlockId, CopyOp, Fate, Key, PoolCounts, Scope, Token

DEVICE = "device"


class KvCache:
    """A pool of blocks, an index of what they hold, and the leases on them.

    Asks (`match`, `plan`) change nothing; `apply`, `commit`, `release` and `drop_unleased` are the only mutators. One
    thread owns it. A request asks again only after `epoch` has moved: until then the answers stay the same.
    """

    def __init__(
        self, pool_blocks: int, block_tokens: int, *, codec: Codec, eviction: EvictionPolicy, facts: FactLog
    ) -> None:
        """`pool_blocks` blocks of `block_tokens` tokens, both at least 1. The log's facts teach `eviction`."""
        if block_tokens < 1:
            raise ValueError(f"a block needs at least one token, not {block_tokens}")
        self._size = block_tokens
        self._codec = codec
        self._eviction = eviction
        self._facts = facts
        self._pool = BlockPool(pool_blocks)
        self._index = RadixIndex(block_tokens)
        self._leaves = Leaves(eviction, self._pool, block_tokens)
        self._leases: dict[LeaseId, Held] = {}
        self._promises: dict[Key, LeaseId] = {}
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

    def counts(self) -> PoolCounts:
        return self._pool.counts()

    def match(self, scope: Scope, tokens: Sequence[Token]) -> Match:
        """The longest reusable prefix of all of `tokens`. Stamps nothing."""
        root = keys.root(scope)
        path, head = self._reach(root, tokens, len(tokens))
        start = self._size * len(path)
        awaited = None
        if self._promises and start + self._size <= len(tokens):
            last = path[-1].key if path else root
            awaited = self._promises.get(keys.chain(last, tokens[start : start + self._size]))
        return Match(
            start + (head.tokens if head else 0),
            tuple(node.key for node in path),
            tuple(node.block for node in path),
            head,
            awaited,
        )

    def plan(self, ask: Ask, now: float) -> Plan | Shortfall:
        """How to give what is asked, or why it cannot be given.

        For a new sequence reuse is matched over tokens[:-1]: the last token is always computed, for its logits.
        """
        return self._plan_start(ask, now) if ask.lease is None else self._plan_growth(ask.lease, ask.room, now)

    def tip(self, lease: Lease) -> Key | None:
        """The key of its last full block that is shareable; None when there is none."""
        nodes = self._held(lease).nodes
        return nodes[-1].key if nodes else None

    def leaked(self) -> int:
        """Blocks that are neither free, cached nor of any lease; 0 unless there is a bug."""
        private = sum(
            len(held.lease.blocks) - len(held.nodes) - (held.tail is not None) for held in self._leases.values()
        )
        return self._pool.total - self._pool.free - len(self._index.nodes) - private

    def freed_by(self, lease: Lease) -> int:
        """Blocks that only this lease holds: what its release would make free or evictable."""
        return sum(self._pool.refs[block] == 1 for block in lease.blocks)

    def check(self) -> None:
        """Verify every invariant; raises Corrupt with a sentence naming the one that does not hold."""
        audit.check_index(self._index)
        audit.check_pool(self._pool, self._index, self._leases.values())
        audit.check_leaves(self._leaves, self._pool, self._index)
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
        for key in plan.victims:
            self._evict(self._index.nodes[key], Fate.DROPPED, self._eviction.name, "room", now)
        taken = self._pool.take(plan.takes)
        if plan.lease is not None:
            held = self._leases[plan.lease.id]
            held.lease = replace(plan.lease, blocks=(*plan.lease.blocks, *taken))
            return Grant(held.lease, ())
        for node in nodes:
            self._reuse(node, len(node.tokens), now)
            self._hold(node)
        tail: Node | None = None
        copies: tuple[CopyOp, ...] = ()
        if plan.head and source:
            self._reuse(source, plan.head.tokens, now)
            if plan.head.whole:
                tail = source
                self._hold(tail)
            else:
                copies = (CopyOp(source.block, taken[0]),)
                if source in self._leaves:  # it was just used: let it queue again
                    self._leaves.discard(source)
                    self._leaves.add(source)
        blocks = [node.block for node in (*nodes, *([tail] if tail else []))]
        lease = Lease(
            LeaseId(next(self._ids)), plan.scope, (*blocks, *taken), plan.reused_tokens, self._size * len(nodes)
        )
        self._leases[lease.id] = Held(lease, nodes, tail, set(plan.promises))
        self._promises.update(dict.fromkeys(plan.promises, lease.id))
        return Grant(lease, copies)

    def commit(self, lease: Lease, tokens: Sequence[Token], computed: int, now: float, *, tail: bool = False) -> Lease:
        """Make shareable what is computed: `tokens` are all of the sequence, the first `computed` have valid KV.

        Full blocks fulfil their promises; one that is held already is given back and the held one leased instead,
        so always go on with the lease returned. With `tail` the open block's computed head is published too
        (append-only: the owner goes on writing behind it). Costs nothing when no block became full.
        """
        held = self._held(lease)
        if computed > len(tokens) or computed > self._size * len(lease.blocks):
            raise ValueError(f"{computed} computed of {len(tokens)} tokens in {len(lease.blocks)} blocks")
        if computed >= lease.committed_tokens + self._size:
            self._commit_full(held, tokens, computed, now)
        if tail and computed > held.lease.committed_tokens:
            self._commit_tail(held, tokens, computed, now)
        return held.lease

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
        private = lease.blocks[len(shared) :]
        for block in private:
            self._pool.unhold(block)
        self._pool.give(private)
        for node in reversed(shared):
            if self._pool.unhold(node.block):
                node.last_used = now
                if not node.kids:
                    self._leaves.add(node)
        if bad:
            self._revoke(shared[computed // self._size :], why, now)
        elif held.tail and self._index.is_head(self._parent(held), held.tail.tokens):
            self._evict(held.tail, Fate.DUPLICATE, "cache", "a longer block holds it", now)

    def drop_unleased(self, now: float) -> int:
        """Evict everything nobody leases; the number of blocks dropped."""
        self._epoch += 1
        idle = [node for node in self._index.nodes.values() if self._idle(node)]
        for node in sorted(idle, key=lambda node: -node.depth):
            self._evict(node, Fate.DROPPED, "operator", "reset", now)
        self._facts.emit(CacheCleared(now, len(idle)))
        return len(idle)

    # ---- how

    def _held(self, lease: Lease) -> Held:
        held = self._leases.get(lease.id)
        if held is None or held.lease is not lease:
            raise ValueError(f"lease {lease.id} was released, or this is not its newest receipt")
        return held

    def _idle(self, node: Node) -> bool:
        return self._pool.refs[node.block] == 0

    def _plan_growth(self, lease: Lease, room: int, now: float) -> Plan | Shortfall:
        self._held(lease)
        takes = max(0, self._blocks(room) - len(lease.blocks))
        short = self._shortfall(takes, 0)
        if short:
            return short
        return Plan(self._epoch, lease.scope, lease, (), None, takes, self._victims(takes, now, ()), (), 0)

    def _plan_start(self, ask: Ask, now: float) -> Plan | Shortfall:
        if not ask.tokens or ask.room < len(ask.tokens):
            raise ValueError(f"room for {ask.room} tokens asked for a sequence of {len(ask.tokens)}")
        root = keys.root(ask.scope)
        path, head = self._reach(root, ask.tokens, len(ask.tokens) - 1)
        takes = self._blocks(ask.room) - len(path)
        sources = [self._index.nodes[head.key]] if head else []
        spared = {node for node in (*path, *sources) if self._idle(node)}
        if head and head.whole:
            takes -= 1
        elif head and self._shortfall(takes, len(spared)):
            head = None  # its block is needed: better to compute a few tokens again than not to start
            spared.intersection_update(path)
        short = self._shortfall(takes, len(spared))
        if short:
            return short
        reused = tuple(node.key for node in path)
        return Plan(
            epoch=self._epoch,
            scope=ask.scope,
            lease=None,
            reused=reused,
            head=head,
            takes=takes,
            victims=self._victims(takes, now, spared),
            promises=self._open_keys(reused[-1] if reused else root, ask.tokens, len(path)),
            reused_tokens=self._size * len(path) + (head.tokens if head else 0),
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _parent(self, held: Held) -> Node:
        """Behind which node its next full block goes."""
        return held.nodes[-1] if held.nodes else self._index.root(keys.root(held.lease.scope))

    def _reach(self, root: Key, tokens: Sequence[Token], limit: int) -> tuple[list[Node], Head | None]:
        """The full blocks that hold tokens[:limit], and the longest head behind them."""
        path = self._index.walk(root, tokens, limit)
        start = self._size * len(path)
        parent = path[-1] if path else self._index.roots.get(root)
        if parent is None or not parent.kids or start == limit or not self._codec.head_reusable:
            return path, None
        found = self._index.closest(parent, tuple(tokens[start : min(limit, start + self._size)]))
        if found is None:
            return path, None
        node, n = found
        whole = n == len(node.tokens) and self._idle(node)
        return path, Head(node.key, node.block, n, whole)

    def _shortfall(self, takes: int, spared: int) -> Shortfall | None:
        free, evictable = self._pool.free, self._pool.cached - spared
        if takes <= free + evictable:
            return None
        leased = self._pool.counts().leased
        reason = f"{takes} blocks wanted, {free} free, {evictable} evictable; {len(self._leases)} leases hold {leased}"
        return Shortfall(takes, free, evictable, reason)

    def _victims(self, takes: int, now: float, spared: Iterable[Node]) -> tuple[Key, ...]:
        """Every idle block can go, leaf by leaf: whoever leases a block leases all before it."""
        wanted = takes - self._pool.free
        if wanted <= 0:
            return ()
        return tuple(node.key for node in self._leaves.choose(wanted, now, frozenset(spared)))

    def _open_keys(self, last: Key, tokens: Sequence[Token], held: int) -> tuple[Key, ...]:
        """Keys of the full blocks behind the `held` first that nobody computes yet."""
        rest = keys.chain_of(last, tokens[self._size * held :], self._size)
        return tuple(key for key in rest if key not in self._promises)

    def _hold(self, node: Node) -> None:
        self._leaves.discard(node)
        self._pool.hold(node.block)

    def _reuse(self, node: Node, tokens: int, now: float) -> None:
        self._facts.emit(BlockReused(now, node.key, DEVICE, tokens, now - node.last_used))
        node.last_used = now

    def _commit_full(self, held: Held, tokens: Sequence[Token], computed: int, now: float) -> None:
        self._epoch += 1
        self._withdraw(held, now)
        blocks = list(held.lease.blocks)
        parent = self._parent(held)
        for i in range(len(held.nodes), computed // self._size):
            ids = tuple(tokens[self._size * i : self._size * (i + 1)])
            node = self._index.child(parent, ids)
            if node is None:
                node = self._store(parent, ids, blocks[i], now)
            else:
                self._merge(node, blocks[i], now)
                blocks[i] = node.block
            if node.key in held.promised:
                held.promised.discard(node.key)
                del self._promises[node.key]
            held.nodes.append(node)
            parent = node
        held.lease = replace(held.lease, blocks=tuple(blocks), committed_tokens=self._size * len(held.nodes))

    def _commit_tail(self, held: Held, tokens: Sequence[Token], computed: int, now: float) -> None:
        start = held.lease.committed_tokens
        if not self._codec.head_reusable or (held.tail and len(held.tail.tokens) >= computed - start):
            return
        self._epoch += 1
        self._withdraw(held, now)
        ids = tuple(tokens[start:computed])
        parent = self._parent(held)
        if self._index.child(parent, ids) is None and not self._index.is_head(parent, ids):
            held.tail = self._store(parent, ids, held.lease.blocks[len(held.nodes)], now)

    def _withdraw(self, held: Held, now: float) -> None:
        """Take back the lease's own tail, because its block now holds more."""
        if held.tail:
            self._forget(held.tail, Fate.DUPLICATE, "cache", "its owner wrote on", now)
            held.tail = None

    def _store(self, parent: Node, ids: tuple[Token, ...], block: BlockId, now: float) -> Node:
        """Make a leased block shareable; an idle tail that it continues goes, since its tokens are held twice now."""
        node = self._index.attach(parent, keys.chain(parent.key, ids), ids, block, now)
        above = parent.key if parent.parent else None
        self._facts.emit(BlockStored(now, node.key, above, block, DEVICE, self._codec.name, len(ids), ids))
        shorter = self._index.shorter(node)
        if shorter and self._idle(shorter):
            self._evict(shorter, Fate.DUPLICATE, "cache", "a longer block holds it", now)
        return node

    def _merge(self, node: Node, ours: BlockId, now: float) -> None:
        """Two sequences computed the same block: lease the one that is held and give ours back."""
        self._hold(node)
        node.last_used = now
        self._pool.unhold(ours)
        self._pool.give([ours])
        self._facts.emit(BlockMerged(now, node.key, node.block, ours))

    def _evict(self, leaf: Node, fate: Fate, by: str, reason: str, now: float) -> None:
        """Let go of an idle leaf and its block."""
        self._leaves.discard(leaf)
        self._forget(leaf, fate, by, reason, now)
        self._pool.give([leaf.block])
        parent = leaf.parent
        if parent and parent.parent and not parent.kids and self._idle(parent):
            self._leaves.add(parent)

    def _revoke(self, nodes: list[Node], why: str, now: float) -> None:
        """Let go of what is bad, from the first of `nodes` that nobody leases: all behind an idle block is idle."""
        bad = [node for node in nodes if self._idle(node)][:1]
        for node in bad:
            bad.extend(node.kids)  # grows while it is read: the whole subtree, parents first
        for node in reversed(bad):
            self._evict(node, Fate.CORRUPT, "cache", why, now)

    def _forget(self, leaf: Node, fate: Fate, by: str, reason: str, now: float) -> None:
        """Drop a leaf from the index; the one way a key leaves the device."""
        self._index.detach(leaf)
        lost = len(leaf.tokens) if fate.is_loss else 0
        idle, age = now - leaf.last_used, now - leaf.created
        self._facts.emit(BlockGone(now, leaf.key, leaf.block, DEVICE, fate, by, reason, lost, idle, age))
