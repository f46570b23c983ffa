//! Compares random trees with decoding token by token, bit for bit, on any planned engine.

use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::gemma4::Gemma4;
use gemma::models::{Config, ExpertSpec, LayerSpec, RopeSpec};
use rand::Rng;
use rand::rngs::SmallRng;

pub const VOCAB: u32 = 96;

pub fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|v| v.to_bits()).collect()
}

/// Changes a configuration to one of Gemma 4.
///
/// Its global layers have other heads and another rotation than the local ones.
pub fn reshape_global_layers(mut config: Config) -> Config {
    (config.architecture, config.logit_cap) = (&Gemma4, Some(30.0));
    for layer in config.layers.iter_mut().filter(|layer| layer.is_global()) {
        let rope = RopeSpec { share: 0.25, factor: 1.0, ..layer.rope };
        let (n_heads, n_kv_heads, head_dim) = (4, 1, 64);
        *layer = LayerSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            rope,
            query_scale: 0.125,
            values_are_keys: true,
            whole_images: false,
            ..*layer
        };
    }
    config
}

/// The same as a mixture of experts. The width of its rows is a multiple of 32.
pub fn mixed(config: Config) -> Config {
    let experts = Some(ExpertSpec { count: 7, used: 3, width: 96, fused: true });
    Config { experts, ..reshape_global_layers(config) }
}

/// Commits `tokens` in random chunks.
pub fn prefill(engine: &mut PlannedEngine, tokens: &[u32], rng: &mut SmallRng) {
    prefill_sequence(engine, 0, tokens, rng);
}

pub fn prefill_sequence(
    engine: &mut PlannedEngine,
    sequence: usize,
    tokens: &[u32],
    rng: &mut SmallRng,
) {
    let mut scores = Scores::default();
    let mut at = 0;
    while at < tokens.len() {
        let n = rng.random_range(1..=engine.info().max_rows.min(tokens.len() - at));
        let chain = TokenTree::chain(&tokens[at..at + n]);
        let input = Input::new(sequence, &chain, Rows::None);
        engine.run(&[input], Output::Logits, &mut scores).unwrap();
        engine.commit(&[(sequence, &(0..n as u32).collect::<Vec<_>>())]).unwrap();
        at += n;
    }
}

/// Returns the logits after the last token of `path`, decoded token by token. Restores the engine.
pub fn one_by_one(engine: &mut PlannedEngine, path: &[u32]) -> Vec<u32> {
    node_by_node(engine, &TokenTree::chain(path)).pop().unwrap()
}

/// Returns the logits of each node, with its path decoded token by token.
///
/// Restores the engine. Common prefixes of paths are decoded once.
pub fn node_by_node(engine: &mut PlannedEngine, tree: &TokenTree) -> Vec<Vec<u32>> {
    let mut paths: Vec<Vec<u32>> = Vec::new();
    for (node, parent) in tree.parent.iter().enumerate() {
        let mut path = parent.map_or(Vec::new(), |p| paths[p as usize].clone());
        path.push(node as u32);
        paths.push(path);
    }
    let (start, mut out, mut scores) =
        (engine.position(0), vec![Vec::new(); tree.len()], Scores::default());
    paths.sort_unstable();
    // In this order, each path is its parent's path and one more token.
    for path in &paths {
        let node = path[path.len() - 1];
        engine.truncate(0, start + path.len() - 1).unwrap();
        engine
            .forward(&TokenTree::root(tree.tokens[node as usize]), Rows::All, &mut scores)
            .unwrap();
        engine.commit(&[(0, &[0])]).unwrap();
        out[node as usize] = bits(scores.row(0));
    }
    engine.truncate(0, start).unwrap();
    out
}

pub fn random_tree(rng: &mut SmallRng, rows: usize) -> TokenTree {
    let mut tree = TokenTree::root(rng.random_range(0..VOCAB));
    let lean = rng.random_range(0.0..1.0);
    while tree.len() < rows {
        let parent = if rng.random_bool(lean) {
            tree.len() as u32 - 1
        } else {
            rng.random_range(0..tree.len() as u32)
        };
        tree.push(parent, rng.random_range(0..VOCAB));
    }
    tree
}

/// Returns the first `n` nodes of a tree.
pub fn part(tree: &TokenTree, n: usize) -> TokenTree {
    TokenTree { tokens: tree.tokens[..n].to_vec(), parent: tree.parent[..n].to_vec() }
}

/// Compares every node of a random tree at `position` with token-by-token decoding on a second
/// engine.
pub fn check_tree(
    a: &mut PlannedEngine,
    b: &mut PlannedEngine,
    tokens: &[u32],
    rng: &mut SmallRng,
    what: &str,
) {
    for e in [&mut *a, &mut *b] {
        // If an engine holds a prefix of the text, it reads the rest.
        let held = e.cached(0).tokens;
        let held = if tokens.starts_with(held) { held.len() } else { 0 };
        e.truncate(0, held).unwrap();
        prefill(e, &tokens[held..], rng);
    }
    let rows = rng.random_range(1..=32);
    let tree = random_tree(rng, rows);
    let mut scores = Scores::default();
    let split = rng.random_range(0..tree.len());
    let mut got = Vec::new();
    if split > 0 {
        a.forward(&part(&tree, split), Rows::All, &mut scores).unwrap();
        got.extend((0..split).map(|i| bits(scores.row(i))));
        let rest = Input::new(0, &tree, Rows::All).after(split);
        a.run(&[rest], Output::Logits, &mut scores).unwrap();
    } else {
        a.forward(&tree, Rows::All, &mut scores).unwrap();
    }
    got.extend((0..scores.rows()).map(|i| bits(scores.row(i))));
    assert_eq!(got.len(), tree.len());
    for (node, want) in node_by_node(b, &tree).iter().enumerate() {
        assert_eq!(got[node], *want, "{what}: node {node} of {rows} at position {}", tokens.len());
    }
}

/// Runs rounds of random trees of several sequences in one pass, starting from histories of these
/// lengths. Compares them with engines of one sequence each.
#[allow(dead_code)]
pub fn check_sequences(
    shared: &mut PlannedEngine,
    alone: &mut [PlannedEngine],
    lengths: &[usize],
    rng: &mut SmallRng,
    what: &str,
) {
    for (sequence, &n) in lengths.iter().enumerate() {
        let text = tokens(rng, n);
        prefill_sequence(shared, sequence, &text, rng);
        prefill(&mut alone[sequence], &text, rng);
    }
    let (mut together, mut scores) = (Scores::default(), Scores::default());
    for round in 0..8 {
        // A random subset in random order.
        let mut order: Vec<usize> =
            (0..lengths.len()).filter(|_| round == 0 || rng.random_bool(0.7)).collect();
        let turn = round % order.len().max(1);
        order.rotate_left(turn);
        let trees: Vec<_> = order
            .iter()
            .map(|_| {
                let rows = [1, rng.random_range(1..=9)][round % 2];
                if round % 4 == 3 {
                    TokenTree::chain(&tokens(rng, rows))
                } else {
                    random_tree(rng, rows)
                }
            })
            .collect();
        if order.is_empty() {
            continue;
        }
        // Evaluates trees in one pass, or in two parts with a complete tree between them.
        let splits: Vec<usize> = trees
            .iter()
            .map(|tree| if round % 3 == 2 { rng.random_range(1..=tree.len()) } else { tree.len() })
            .collect();
        let parts: Vec<TokenTree> = trees.iter().zip(&splits).map(|(t, n)| part(t, *n)).collect();
        let mut rows: Vec<Vec<Vec<u32>>> = vec![Vec::new(); trees.len()];
        for (trees, done) in [(&parts, &vec![0; trees.len()]), (&trees, &splits)] {
            let inputs: Vec<Input<'_>> = (0..trees.len())
                .map(|i| Input::new(order[i], &trees[i], Rows::All).after(done[i]))
                .collect();
            if inputs.iter().all(|input| input.scored() == 0) {
                continue;
            }
            shared.run(&inputs, Output::Logits, &mut together).unwrap();
            let mut row = 0;
            for (own, input) in rows.iter_mut().zip(&inputs) {
                own.extend((row..row + input.scored()).map(|row| bits(together.row(row))));
                row += input.scored();
            }
            assert_eq!(together.rows(), row);
        }
        let mut paths = Vec::new();
        for ((&sequence, tree), own) in order.iter().zip(&trees).zip(rows) {
            alone[sequence].forward(tree, Rows::All, &mut scores).unwrap();
            for node in 0..tree.len() {
                let at = format!("{what}, round {round}, sequence {sequence}, node {node}");
                assert_eq!(own[node], bits(scores.row(node)), "{at}");
            }
            // Accepts a path. In some trees nothing is accepted.
            let path = random_path(rng, tree);
            if rng.random_bool(0.8) {
                alone[sequence].commit(&[(0, &path)]).unwrap();
                paths.push((sequence, path));
            }
        }
        shared.commit(&paths.iter().map(|(s, path)| (*s, &path[..])).collect::<Vec<_>>()).unwrap();
    }
    for (sequence, alone) in alone.iter_mut().enumerate() {
        assert_eq!(shared.position(sequence), alone.position(0));
        assert!(
            shared.visible_cache(sequence).unwrap() == alone.visible_cache(0).unwrap(),
            "{what}, sequence {sequence}"
        );
    }
}

/// Returns the nodes from the root to a random node.
fn random_path(rng: &mut SmallRng, tree: &TokenTree) -> Vec<u32> {
    let mut path = vec![rng.random_range(0..tree.len() as u32)];
    while let Some(parent) = tree.parent[path[path.len() - 1] as usize] {
        path.push(parent);
    }
    path.reverse();
    path
}

pub fn tokens(rng: &mut SmallRng, n: usize) -> Vec<u32> {
    (0..n).map(|_| rng.random_range(0..VOCAB)).collect()
}
