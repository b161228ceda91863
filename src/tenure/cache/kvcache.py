"""The façade of the cache: what is resident, and whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from tenure.cache import audit, keys
from tenure.cache.find import Finder
from tenure.cache.ghosts import Ghosts
from tenure.cache.lease import Grant, Held, Lease, LeaseId
from tenure.cache.leaves import Leaves
from tenure.cache.ledger import Ledger
from tenure.cache.plan import Ask, Head, Lost, Match, Plan, Shortfall
from tenure.cache.pool import STORED, BlockPool, SlabPool
from tenure.cache.radix import Node, RadixIndex, Usable
from tenure.cache.recode import Recoded, RecodePlan, Recoder
from tenure.cache.supply import Supply
from tenure.errors import StalePlan
from tenure.events import BlockGone, BlockMerged, BlockReused, BlockStored, CacheCleared, FactLog
from tenure.policy.base import EvictionPolicy
from tenure.spec import ArenaLayout, Codec
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
        self._usable: Usable | None = None
        if len(self._pool.codecs) > 1:
            self._usable = self._is_usable
        self._index = RadixIndex(block_tokens)
        self._roots = keys.Roots(block_tokens, shared)
        self._owners: dict[Key, str] = {}
        """The tenants of the roots that have blocks."""
        self.ghosts = ghosts if ghosts is not None else Ghosts(0)
        self._leaves = Leaves(eviction, self._pool, block_tokens)
        self._leases: dict[LeaseId, Held] = {}
        self._find = Finder(self._index, self._roots, self.ghosts)
        self._supply = Supply(self._pool, self._leaves, self._leases, block_tokens)
        self._promises: dict[Key, LeaseId] = {}
        self._recoder = Recoder(self._pool, self._index, self._leaves, self._leases, self._promises)
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

    def counts(self) -> PoolCounts:
        return self._pool.counts()

    def by_codec(self) -> tuple[KindCounts, ...]:
        """Blocks in use, by how they are stored."""
        return self._pool.by_kind()

    def codecs(self, lease: Lease, computed: int, tokens: int) -> dict[str, int]:
        """How the tokens of a sequence are held, in tokens by codec; what is not computed yet counts as open."""
        return self._supply.codecs(lease, computed, tokens)

    def match(self, scope: Scope, tokens: Sequence[Token], *, exact: bool = False) -> Match:
        """The longest reusable prefix of all of `tokens`. Stamps nothing."""
        path, head, behind = self._reach(scope, tokens, len(tokens), exact)
        start = self._size * len(path)
        awaited = None
        if self._promises and start + self._size <= len(tokens):
            awaited = self._promises.get(keys.chain(behind, tokens[start : start + self._size]))
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

    def lost(self, scope: Scope, tokens: Sequence[Token], matched: int) -> Lost:
        """What of tokens[matched:] was held once, as far as the ghosts know; the newest token is always computed."""
        return self._find.lost(scope, tokens, matched)

    def recodable(self, lease: Lease) -> int:
        """Blocks of a lease that could be stored in fewer bits, as far as that is known without trying."""
        return self._recoder.able(self._held(lease))

    def plan_recode(self, lease: Lease, codec: str, n: int, now: float) -> RecodePlan | Shortfall:
        """How to make room of about `n` stored blocks by storing the oldest of a lease in `codec`; see `Recoder`."""
        return self._recoder.plan(self._epoch, self._held(lease), codec, n, now)

    def tokens_of(self, blocks: Sequence[Key]) -> int:
        """How many tokens these blocks hold."""
        return sum(len(self._index.nodes[key].tokens) for key in blocks)

    def leaked(self) -> int:
        """Blocks that are neither free, cached nor of any lease; 0 unless there is a bug."""
        private = sum(len(held.private()) for held in self._leases.values())
        return self._pool.used - len(self._index.nodes) - private

    def freed_by(self, lease: Lease) -> int:
        """Blocks that only this lease holds: what its release would make free or evictable."""
        own = lease.open is not None and self._pool.refs[lease.open] == 1
        return own + sum(self._pool.refs[block] == 1 for block in lease.blocks)

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
        for key in plan.victims:
            self._evict(self._index.nodes[key], Fate.DROPPED, self._eviction.name, "room", now)
        taken = self._pool.take(plan.takes)
        if plan.lease is not None:
            held = self._leases[plan.lease.id]
            blocks = (*plan.lease.blocks, *taken)
            held.lease = replace(plan.lease, blocks=blocks, room=self._supply.room(len(blocks)))
            return Grant(held.lease, ())
        opened = self._pool.take(plan.opens, self._pool.staging)
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
                copies = (CopyOp(source.block, (opened or taken)[0]),)
                if source in self._leaves:  # it was just used: let it queue again
                    self._leaves.discard(source)
                    self._leaves.add(source)
        here = [node.block for node in nodes]
        if tail:
            (opened if self.staged else here).append(tail.block)
        lease = Lease(
            LeaseId(next(self._ids)),
            plan.scope,
            (*here, *taken),
            plan.reused_tokens,
            self._size * len(nodes),
            self._supply.room(len(here) + len(taken)),
            opened[0] if opened else None,
            plan.exact,
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
        if not path:
            return None
        self._epoch += 1
        for node in path:
            self._hold(node)
        held = self._size * len(path)
        lease = Lease(LeaseId(next(self._ids)), scope, tuple(node.block for node in path), held, held, held, exact=True)
        self._leases[lease.id] = Held(lease, path, None, set())
        return lease

    def let_go(self, scope: Scope, tokens: Sequence[Token], now: float, by: str, reason: str) -> int:
        """Drop what of `tokens` nobody leases and no other prompt goes on from; the number of blocks."""
        path, head, _ = self._reach(scope, tokens, len(tokens))
        self._epoch += 1
        tail = [self._index.nodes[head.key]] if head and head.whole else []
        dropped = 0
        for node in (*tail, *reversed(path)):
            if node.kids or not self._idle(node):
                break
            self._evict(node, Fate.DROPPED, by, reason, now)
            dropped += 1
        return dropped

    def apply_recode(self, plan: RecodePlan, by: str, now: float) -> Recoded:
        """Carry out a plan to recode: all of it, or none (StalePlan when the epoch has moved)."""
        if plan.epoch != self._epoch:
            raise StalePlan(f"planned at epoch {plan.epoch}, applied at {self._epoch}")
        self._epoch += 1
        for key in plan.victims:
            self._evict(self._index.nodes[key], Fate.DROPPED, self._eviction.name, "room to recode", now)
        made, renamed = self._recoder.apply(plan)
        for node, key, block in renamed:
            self._told_recoded(node, key, block, by, now)
        return made

    def _told_recoded(self, node: Node, key: Key, block: BlockId, by: str, now: float) -> None:
        owner, idle, age = self._owner(node), now - node.last_used, now - node.created
        reason = f"recoded to {self._pool.codec(node.block)}" if block != node.block else "stands on a recoded block"
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
        for node in reversed(shared):
            if self._pool.unhold(node.block):
                node.last_used = now
                if not node.kids:
                    self._leaves.add(node)
        if bad:
            self._revoke(shared[computed // self._size :], why, now)
        elif held.tail and held.tail.parent and self._index.is_head(held.tail.parent, held.tail.tokens, self._usable):
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

    def _is_usable(self, node: Node) -> bool:
        """Whether the head of a block serves who goes on from the block before it."""
        above = node.parent is not None and node.parent.recoded
        return above == node.recoded and self._pool.unquantised(node.block)

    def _plan_growth(self, lease: Lease, room: int, now: float) -> Plan | Shortfall:
        self._held(lease)
        takes = max(0, self._supply.stored(room) - len(lease.blocks))
        short = self._supply.shortfall(takes, 0, ())
        if short:
            return short
        victims = self._supply.victims(takes, 0, now, ())
        return Plan(self._epoch, lease.scope, lease.exact, lease, (), None, takes, 0, victims, (), 0, takes)

    def _plan_start(self, ask: Ask, now: float) -> Plan | Shortfall:
        if not ask.tokens or ask.room < len(ask.tokens):
            raise ValueError(f"room for {ask.room} tokens asked for a sequence of {len(ask.tokens)}")
        path, head, behind = self._reach(ask.scope, ask.tokens, 0 if ask.fresh else len(ask.tokens) - 1, ask.exact)
        takes, opens = self._supply.needs(ask.room, len(path), head)
        sources = [self._index.nodes[head.key]] if head else []
        spared = {node for node in (*path, *sources) if self._idle(node)}
        if head and self._supply.shortfall(takes, opens, spared):
            head = None  # its block is needed: better to compute a few tokens again than not to start
            takes, opens = self._supply.needs(ask.room, len(path), head)
            spared.intersection_update(path)
        short = self._supply.shortfall(takes, opens, spared)
        if short:
            return short
        return Plan(
            epoch=self._epoch,
            scope=ask.scope,
            exact=ask.exact,
            lease=None,
            reused=tuple(node.key for node in path),
            head=head,
            takes=takes,
            opens=opens,
            victims=self._supply.victims(takes, opens, now, spared),
            promises=self._open_keys(ask.scope, ask.tokens, len(path), behind),
            reused_tokens=self._size * len(path) + (head.tokens if head else 0),
            leases=takes + sum(map(self._idle, path)) + (head is not None and head.whole),
        )

    def _reach(
        self, scope: Scope, tokens: Sequence[Token], limit: int, exact: bool = False
    ) -> tuple[list[Node], Head | None, Key]:
        """The full blocks, the longest head behind them, and the key that what comes next follows."""
        path, behind = self._find.walk(scope, tokens, limit, exact=exact)
        start = self._size * len(path)
        parent = self._index.nodes.get(behind) or self._index.roots.get(behind)
        if parent is None or not parent.kids or start == limit or not self._tails:
            return path, None, behind
        found = self._index.closest(parent, tuple(tokens[start : min(limit, start + self._size)]), self._usable)
        if found is None:
            return path, None, behind
        node, n = found
        whole = n == len(node.tokens) and self._idle(node)
        return path, Head(node.key, node.block, n, whole), behind

    def _open_keys(self, scope: Scope, tokens: Sequence[Token], held: int, behind: Key) -> tuple[Key, ...]:
        """Keys of the full blocks behind the `held` first that nobody computes yet."""
        rest = self._roots.chain(scope, tokens, held, behind)
        return tuple(key for key in rest if key not in self._promises)

    def _hold(self, node: Node) -> None:
        self._leaves.discard(node)
        self._pool.hold(node.block)

    def _reuse(self, node: Node, tokens: int, now: float) -> None:
        self._facts.emit(BlockReused(now, node.key, DEVICE, tokens, now - node.last_used, tenant=self._owner(node)))
        node.last_used = now

    def _commit_full(self, held: Held, tokens: Sequence[Token], computed: int, now: float) -> None:
        self._epoch += 1
        self._withdraw(held, now)
        blocks = list(held.lease.blocks)
        scope = held.lease.scope
        common = self._roots.common(scope, tokens)
        for i in range(len(held.nodes), computed // self._size):
            ids = tuple(tokens[self._size * i : self._size * (i + 1)])
            parent = self._find.behind(scope, held.nodes, common)
            node = self._index.child(parent, ids)
            if node is None:
                node = self._store(scope, parent, ids, blocks[i], now)
            else:
                self._merge(node, blocks[i], now)
                blocks[i] = node.block
            if node.key in held.promised:
                held.promised.discard(node.key)
                del self._promises[node.key]
            held.nodes.append(node)
        held.lease = replace(held.lease, blocks=tuple(blocks), committed_tokens=self._size * len(held.nodes))

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
            block = lease.blocks[len(held.nodes)] if lease.open is None else lease.open
            held.tail = self._store(scope, parent, ids, block, now)

    def _withdraw(self, held: Held, now: float) -> None:
        """Take back the lease's own tail, because its block now holds more."""
        if held.tail:
            self._forget(held.tail, Fate.DUPLICATE, "cache", "its owner wrote on", now)
            held.tail = None

    def _store(self, scope: Scope, parent: Node, ids: tuple[Token, ...], block: BlockId, now: float) -> Node:
        """Make a leased block shareable; an idle tail that it continues goes, since its tokens are held twice now."""
        node = self._index.attach(parent, keys.chain(parent.key, ids), ids, block, now)
        if not parent.parent and parent.key not in self._owners:
            everyone = parent.key == self._roots.first(scope, 1)
            self._owners[parent.key] = "" if everyone else scope.tenant
        self.ghosts.forget(node.key)
        self._told_stored(node, now)
        shorter = self._index.shorter(node, self._usable)
        if shorter and self._idle(shorter):
            self._evict(shorter, Fate.DUPLICATE, "cache", "a longer block holds it", now)
        return node

    def _told_stored(self, node: Node, now: float) -> None:
        above = node.parent.key if node.parent and node.parent.parent else None
        codec, ids, owner = self._pool.codec(node.block), node.tokens, self._owner(node)
        self._facts.emit(BlockStored(now, node.key, above, node.block, DEVICE, codec, len(ids), ids, tenant=owner))

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
        assert leaf.parent is not None
        self._index.detach(leaf)
        lost = len(leaf.tokens) if fate.is_loss else 0
        if lost:
            self.ghosts.add(leaf.key, leaf.parent.key, leaf.tokens, fate, by, now)
        idle, age, owner = now - leaf.last_used, now - leaf.created, self._owner(leaf)
        self._facts.emit(BlockGone(now, leaf.key, leaf.block, DEVICE, fate, by, reason, lost, idle, age, tenant=owner))
        if leaf.scope_digest not in self._index.roots:
            del self._owners[leaf.scope_digest]

    def _owner(self, node: Node) -> str:
        """The tenant whose block it is; nobody for what belongs to all."""
        return self._owners[node.scope_digest]
