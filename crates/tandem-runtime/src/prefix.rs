//! Prompt prefixes that need not be computed again.
//!
//! Sequences of ended requests are kept frozen in a radix tree over their tokens. A new prompt walks down the tree as far
//! as it agrees, and forks a sequence there: at its end, or at an inner position of one that goes on differently. So a
//! chat's next turn computes only what it adds, also where the template renders history otherwise than the model wrote
//! it (thinking that is dropped, say): what they have in common is forked.
//!
//! The engine promises that a fork is exact or says that it cannot, and then a shorter prefix is tried. Each adapter has
//! a tree of its own. What else `open` fixed (ropes that depend on the length) is the engine's to compare.
//!
//! Where the engine forks at any position, a sequence that is the start of another need not be kept. Where it does not
//! (it has dropped what lies before a window), both are, and the scheduler also keeps prompts as they ended.
//!
//! The tree yields: it holds a number of tokens at most, and gives up the least recently used sequences whenever a
//! request needs their memory. One whose KV others hold too is passed over, because closing it would free nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};

use tandem_engine::{AdapterId, Engine, Fork, SeqId};

/// A frozen sequence.
#[derive(Debug)]
struct Entry {
    seq: SeqId,
    /// When it was last of use, by the tree's clock.
    used: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct NodeId(u64);

#[derive(Debug)]
struct Node {
    /// `None` for the root of a tree.
    parent: Option<NodeId>,
    /// Tokens from the parent to here.
    edge: Vec<u32>,
    /// By the first token of their edge.
    children: BTreeMap<u32, NodeId>,
    entry: Option<Entry>,
}

/// The trees.
#[derive(Debug)]
pub(crate) struct Prefixes {
    nodes: BTreeMap<NodeId, Node>,
    roots: HashMap<Option<AdapterId>, NodeId>,
    /// The engine forks at any position.
    anywhere: bool,
    /// Most tokens on all edges.
    limit: usize,
    tokens: usize,
    clock: u64,
    made: u64,
}

/// How far some tokens go down a tree.
struct Walk {
    /// The nodes they meet and the tokens up to the end of each; the last one's edge may agree only in part.
    path: Vec<(NodeId, usize)>,
    /// Tokens that agree.
    agreed: usize,
}

impl Prefixes {
    /// Holds at most `limit` tokens, for an engine that forks `anywhere` or only at ends.
    pub fn new(limit: usize, anywhere: bool) -> Self {
        let (nodes, roots) = (BTreeMap::new(), HashMap::new());
        Self { nodes, roots, anywhere, limit, tokens: 0, clock: 0, made: 0 }
    }

    /// Tokens held, those of common prefixes once.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// How many of `tokens` a fork would probably spare.
    pub fn agreed(&self, adapter: Option<AdapterId>, tokens: &[u32]) -> usize {
        let known = &tokens[..tokens.len().saturating_sub(1)];
        self.walk(adapter, known).map_or(0, |walk| walk.agreed)
    }

    /// A sequence that starts with as much of `tokens` as can be had, and how much that is. Never all of it: the last
    /// token has to be computed for its logits.
    pub fn fork(
        &mut self,
        engine: &mut dyn Engine,
        adapter: Option<AdapterId>,
        tokens: &[u32],
        max_len: usize,
    ) -> Option<(SeqId, usize)> {
        let Walk { path, agreed } = self.walk(adapter, &tokens[..tokens.len().saturating_sub(1)])?;
        let below = path.last().and_then(|(node, _)| self.nearest(*node)).map(|node| (node, agreed));
        let above = path.iter().rev().copied().filter(|(_, end)| *end < agreed);
        for (node, at) in below.into_iter().chain(above) {
            let Some(entry) = self.node(node).entry.as_ref().filter(|_| at > 0) else { continue };
            match engine.fork(entry.seq, at, max_len) {
                Ok(Fork::Exact(seq)) => {
                    self.touch(node);
                    return Some((seq, at));
                }
                Ok(Fork::Inexact) => {}
                Err(error) => tracing::error!(%error, "forking a kept sequence"),
            }
        }
        None
    }

    /// Keeps `seq`, which holds `tokens` and is nobody else's any more.
    pub fn keep(&mut self, engine: &mut dyn Engine, adapter: Option<AdapterId>, tokens: &[u32], seq: SeqId) {
        if tokens.is_empty() || tokens.len() > self.limit {
            return close(engine, seq);
        }
        let (node, ancestors) = self.place(adapter, tokens);
        if self.anywhere {
            if let Some(longer) = self.nearest(node).filter(|longer| *longer != node) {
                self.touch(longer);
                close(engine, seq);
                return self.prune(node);
            }
            for ancestor in ancestors {
                self.give_up(engine, ancestor);
            }
        }
        self.clock += 1;
        let entry = Entry { seq, used: self.clock };
        if let Some(old) = self.node_mut(node).entry.replace(entry) {
            close(engine, old.seq);
        }
        while self.tokens > self.limit
            && let Some(oldest) = self.by_age().first().copied()
        {
            self.give_up(engine, oldest);
        }
    }

    /// Closes the least recently used until `bytes` are free; whether any are.
    pub fn free(&mut self, engine: &mut dyn Engine, bytes: u64) -> bool {
        let mut freed = 0;
        loop {
            let before = freed;
            for node in self.by_age() {
                if freed >= bytes {
                    return freed > 0;
                }
                let exclusive = self.exclusive(engine, node);
                if exclusive > 0 {
                    self.give_up(engine, node);
                    freed += exclusive;
                }
            }
            // What two of them shared is exclusive once the first is closed.
            if freed == before {
                return freed > 0;
            }
        }
    }

    /// Bytes that [`Prefixes::free`] can free at least.
    pub fn exclusive_bytes(&self, engine: &dyn Engine) -> u64 {
        self.nodes.keys().map(|node| self.exclusive(engine, *node)).sum()
    }

    /// Closes all.
    pub fn clear(&mut self, engine: &mut dyn Engine) {
        for node in self.by_age() {
            self.give_up(engine, node);
        }
    }

    fn exclusive(&self, engine: &dyn Engine, node: NodeId) -> u64 {
        let bytes = self.node(node).entry.as_ref().and_then(|entry| engine.sequence_bytes(entry.seq).ok());
        bytes.map_or(0, |bytes| bytes.exclusive)
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[&id]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).expect("ids of nodes are not kept beyond their node")
    }

    fn add(&mut self, parent: Option<NodeId>, edge: Vec<u32>) -> NodeId {
        self.made += 1;
        self.tokens += edge.len();
        let id = NodeId(self.made);
        if let (Some(parent), Some(first)) = (parent, edge.first()) {
            self.node_mut(parent).children.insert(*first, id);
        }
        self.nodes.insert(id, Node { parent, edge, children: BTreeMap::new(), entry: None });
        id
    }

    fn touch(&mut self, node: NodeId) {
        self.clock += 1;
        let now = self.clock;
        if let Some(entry) = &mut self.node_mut(node).entry {
            entry.used = now;
        }
    }

    fn walk(&self, adapter: Option<AdapterId>, tokens: &[u32]) -> Option<Walk> {
        let mut at = *self.roots.get(&adapter)?;
        let mut walk = Walk { path: vec![(at, 0)], agreed: 0 };
        while let Some(next) = tokens.get(walk.agreed).and_then(|token| self.node(at).children.get(token)) {
            let edge = &self.node(*next).edge;
            let common = edge.iter().zip(&tokens[walk.agreed..]).take_while(|(a, b)| a == b).count();
            walk.path.push((*next, walk.agreed + edge.len()));
            walk.agreed += common;
            if common < edge.len() {
                break;
            }
            at = *next;
        }
        Some(walk)
    }

    /// The node where `tokens` end, made if need be, and those above it.
    fn place(&mut self, adapter: Option<AdapterId>, tokens: &[u32]) -> (NodeId, Vec<NodeId>) {
        let root = match self.roots.get(&adapter) {
            Some(root) => *root,
            None => {
                let root = self.add(None, Vec::new());
                self.roots.insert(adapter, root);
                root
            }
        };
        let start = Walk { path: vec![(root, 0)], agreed: 0 };
        let Walk { mut path, agreed } = self.walk(adapter, tokens).unwrap_or(start);
        if let Some((last, end)) = path.last().copied()
            && end > agreed
        {
            let upper = self.split(last, end - agreed);
            path.pop();
            path.push((upper, agreed));
        }
        let mut ids: Vec<NodeId> = path.into_iter().map(|(id, _)| id).collect();
        let mut node = ids.pop().unwrap_or(root);
        if agreed < tokens.len() {
            ids.push(node);
            node = self.add(Some(node), tokens[agreed..].to_vec());
        }
        (node, ids)
    }

    /// Cuts a node's edge `below` tokens before its end; returns the new node there.
    fn split(&mut self, id: NodeId, below: usize) -> NodeId {
        let node = self.node_mut(id);
        let lower = node.edge.split_off(node.edge.len() - below);
        let (upper, parent) = (std::mem::replace(&mut node.edge, lower), node.parent);
        let first = self.node(id).edge[0];
        self.tokens -= upper.len();
        let middle = self.add(parent, upper);
        self.node_mut(middle).children.insert(first, id);
        self.node_mut(id).parent = Some(middle);
        middle
    }

    /// The node with a sequence that is the fewest edges below `id`, itself included.
    fn nearest(&self, id: NodeId) -> Option<NodeId> {
        let mut next = VecDeque::from([id]);
        while let Some(id) = next.pop_front() {
            let node = self.node(id);
            if node.entry.is_some() {
                return Some(id);
            }
            next.extend(node.children.values());
        }
        None
    }

    /// All nodes with a sequence, the least recently used first.
    fn by_age(&self) -> Vec<NodeId> {
        let entries = self.nodes.iter().filter_map(|(id, node)| Some((node.entry.as_ref()?.used, *id)));
        let mut entries: Vec<(u64, NodeId)> = entries.collect();
        entries.sort_unstable();
        entries.into_iter().map(|(_, id)| id).collect()
    }

    /// Closes a node's sequence, if it has one.
    fn give_up(&mut self, engine: &mut dyn Engine, id: NodeId) {
        if let Some(entry) = self.node_mut(id).entry.take() {
            close(engine, entry.seq);
        }
        self.prune(id);
    }

    /// Takes out a node that neither holds a sequence nor parts ways.
    fn prune(&mut self, mut id: NodeId) {
        while let Some(parent) = self.node(id).parent
            && self.node(id).entry.is_none()
        {
            let mut children = self.node(id).children.values().copied();
            match (children.next(), children.next()) {
                (None, _) => {
                    let first = self.node(id).edge[0];
                    self.node_mut(parent).children.remove(&first);
                    self.tokens -= self.node(id).edge.len();
                    self.nodes.remove(&id);
                    id = parent;
                }
                (Some(only), None) => {
                    let mut edge = std::mem::take(&mut self.node_mut(id).edge);
                    let first = edge[0];
                    let child = self.node_mut(only);
                    edge.append(&mut child.edge);
                    (child.edge, child.parent) = (edge, Some(parent));
                    self.node_mut(parent).children.insert(first, only);
                    self.nodes.remove(&id);
                    return;
                }
                _ => return,
            }
        }
    }
}

fn close(engine: &mut dyn Engine, seq: SeqId) {
    if let Err(error) = engine.close(seq) {
        tracing::error!(%error, "closing a kept sequence");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tandem_engine::fake::FakeEngine;
    use tandem_engine::{Input, Row, Want};

    use super::*;

    fn common(a: &[u32], b: &[u32]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    /// Tokens on the edges of a radix tree over `kept`: each sorted after another adds what they have not in common.
    fn distinct(kept: &[Vec<u32>]) -> usize {
        let mut sorted: Vec<&Vec<u32>> = kept.iter().collect();
        sorted.sort();
        let shared: usize = sorted.windows(2).map(|pair| common(pair[0], pair[1])).sum();
        sorted.iter().map(|tokens| tokens.len()).sum::<usize>() - shared
    }

    proptest! {
        /// Against a plain list of what was kept: every prompt finds its longest common prefix, the tree counts common
        /// tokens once, and everything is closed in the end.
        #[test]
        fn a_prompt_finds_the_longest_common_prefix(
            anywhere: bool,
            prompts in prop::collection::vec(prop::collection::vec(0..3u32, 1..12), 1..40),
            freed in 0..5usize,
        ) {
            let fake = FakeEngine::new(64, 64, 1000);
            let mut engine = if anywhere { fake } else { fake.windowed(2) };
            let engine: &mut dyn Engine = &mut engine;
            let mut tree = Prefixes::new(1000, anywhere);
            let mut kept: Vec<Vec<u32>> = Vec::new();
            for tokens in &prompts {
                let known = &tokens[..tokens.len() - 1];
                let longest = kept.iter().map(|kept| common(kept, known)).max().unwrap_or(0);
                prop_assert_eq!(tree.agreed(None, tokens), longest);
                // What has dropped all before a window can be forked where it ends.
                let whole = |kept: &Vec<u32>| {
                    let at = common(kept, known);
                    if anywhere || at == kept.len() { at } else { 0 }
                };
                let exact = kept.iter().map(whole).max().unwrap_or(0);
                let (seq, at) = match tree.fork(engine, None, tokens, 64) {
                    Some(forked) => forked,
                    None => (engine.open(64, None).unwrap(), 0),
                };
                prop_assert_eq!(engine.len(seq), Ok(at));
                prop_assert!(at >= exact, "{} of {}", at, exact);
                prop_assert!(at <= longest);
                let row = Row { seq, input: Input::Tokens(tokens[at..].to_vec()), want: Want::Nothing };
                let ticket = engine.submit(&[row]).unwrap();
                engine.collect(ticket).unwrap();
                tree.keep(engine, None, tokens, seq);
                kept.push(tokens.clone());
                prop_assert_eq!(tree.tokens(), distinct(&kept));
            }
            let before = engine.memory();
            let bytes = freed as u64 * 64;
            if tree.free(engine, bytes) {
                let after = engine.memory();
                let held = |memory: tandem_engine::Memory| memory.kv_exclusive + memory.kv_shared;
                prop_assert!(held(before) - held(after) >= bytes.min(held(before)));
            }
            tree.clear(engine);
            prop_assert_eq!(tree.tokens(), 0);
            prop_assert_eq!(engine.memory().kv_exclusive + engine.memory().kv_shared, 0);
        }
    }
}
