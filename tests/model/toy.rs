//! An architecture that is added according to docs/ADDING.md, compared with a computation in f64.

use gemma::checkpoint::gguf::write::Keys;
use gemma::compute::KvFormat;
use gemma::compute::cpu::{CpuExecutor, CpuOptions};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{EngineExt, PlannedEngine, Rows, Scores, TokenTree};
use gemma::error::Fault;
use gemma::models::architecture::Architecture;
use gemma::models::gguf::GgufModel;
use gemma::models::{
    ChatTemplate, Config, Dialect, KeyNorms, LayerSpec, Message, Role, RopeSpec, Step, Weights,
};
use serde_json::{Value, json};

/// Feeds forward before it attends. Its values are the products with the key matrix.
struct Toy;

static DIALECT: Dialect = Dialect {
    turn: "<turn>",
    template: "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}\n{% endfor %}",
    thought: None,
    calls: None,
    gguf: "llama",
    has_merges: false,
};

/// Keys of the configuration.
const KEYS: [&str; 6] = ["dim", "ffn_dim", "layers", "heads", "head_dim", "window"];
const VOCAB: usize = 50;

impl Architecture for Toy {
    fn name(&self) -> &'static str {
        "Toy"
    }

    fn is_named(&self, model_type: Option<&str>, _: Option<&str>) -> bool {
        model_type == Some("toy")
    }

    fn config(&self, json: &Value) -> Result<Config, Fault> {
        let unknown = json.as_object().and_then(|o| o.keys().find(|k| !KEYS.contains(&&***k)));
        if let Some(key) = unknown {
            return Err(Fault::model(format!("a toy does not compute `{key}`")));
        }
        let number = |key: &str| -> Result<usize, Fault> {
            let number = json[key].as_u64().map(|n| n as usize);
            number.ok_or_else(|| Fault::model(format!("`{key}` is missing")))
        };
        let head_dim = number("head_dim")?;
        let spec = LayerSpec {
            n_heads: number("heads")?,
            n_kv_heads: 1,
            head_dim,
            window: Some(number("window")?),
            rope: RopeSpec { theta: 100.0, factor: 1.0, share: 1.0 },
            query_scale: 1.5 / head_dim as f32,
            values_are_keys: true,
            whole_images: false,
        };
        let mut layers = vec![spec; number("layers")?];
        layers.last_mut().ok_or_else(|| Fault::model("a toy has layers"))?.window = None;
        Ok(Config {
            architecture: &Toy,
            layers,
            dim: number("dim")?,
            ffn_dim: number("ffn_dim")?,
            vocab: VOCAB,
            eps: 1e-5,
            embed_scale: 3.0,
            logit_cap: None,
            max_position: 1024,
            backbone: None,
            experts: None,
            eos: vec![1],
            bos: 2,
            tied: true,
            vocab_is_explicit: true,
        })
    }

    fn gguf(&self) -> &'static str {
        "toy"
    }

    fn gguf_config(&self, _: &GgufModel<'_>) -> Result<Value, String> {
        Err("toys have no GGUF files".to_owned())
    }

    fn gguf_keys(&self, _: &Config, _: &mut Keys) -> anyhow::Result<()> {
        anyhow::bail!("toys have no GGUF files")
    }

    fn dialect(&self) -> &'static Dialect {
        &DIALECT
    }

    fn norm_base(&self) -> f32 {
        0.0
    }

    fn layer(&self, config: &Config, spec: &LayerSpec) -> Vec<Step> {
        let (q, kv) = (spec.query_width(), spec.kv_width());
        vec![
            Step::Norm(Role::PreFfnNorm),
            Step::GateUp { gate: Role::Gate, up: Role::Up, rows: config.ffn_dim },
            Step::Linear("down", vec![(Role::Down, config.dim)]),
            Step::Add { norm: Role::PostFfnNorm, scale: None },
            Step::Norm(Role::InputNorm),
            Step::Linear("qk", vec![(Role::Q, q), (Role::K, kv), (Role::K, kv)]),
            Step::Attend {
                q_norm: Role::QNorm,
                keys: Some(KeyNorms { k_norm: Role::KNorm, v_norm: false }),
            },
            Step::Linear("o", vec![(Role::O, config.dim)]),
            Step::Add { norm: Role::PostAttnNorm, scale: None },
        ]
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Rotates each head of a position.
fn rotated(mut heads: Vec<f64>, position: usize, spec: &LayerSpec) -> Vec<f64> {
    let half = spec.head_dim / 2;
    for head in heads.chunks_exact_mut(spec.head_dim) {
        for i in 0..half {
            let power = -(i as f64) / half as f64;
            let (sin, cos) = (position as f64 * f64::from(spec.rope.theta).powf(power)).sin_cos();
            let (a, b) = (head[i], head[i + half]);
            (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
    heads
}

/// Computes the logits of all tokens of a text from the definition of the toy.
fn by_hand(weights: &Weights, tokens: &[u32]) -> Vec<f64> {
    let c = weights.config();
    let rows = |role, layer| -> Vec<Vec<f64>> {
        let matrix = weights.matrix(role, layer).unwrap();
        let rows = matrix.dequantize();
        rows.chunks_exact(matrix.cols).map(|r| r.iter().map(|w| f64::from(*w)).collect()).collect()
    };
    let product = |role, layer, x: &[f64]| -> Vec<f64> {
        rows(role, layer).iter().map(|row| dot(row, x)).collect()
    };
    // Normalises each part of `x` that has the length of the norm.
    let normed = |role, layer, x: &[f64]| -> Vec<f64> {
        let w = weights.vector(role, layer).unwrap();
        let parts = x.chunks_exact(w.len()).flat_map(|x| {
            let scale = (dot(x, x) / x.len() as f64 + f64::from(c.eps)).sqrt().recip();
            x.iter().zip(&w).map(move |(x, w)| x * scale * f64::from(*w))
        });
        parts.collect()
    };
    let add = |x: &mut [f64], y: Vec<f64>| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    let gelu =
        |x: f64| 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044715 * x.powi(3))).tanh());
    let table = rows(Role::Embed, 0);
    let embedded = |t: &u32| table[*t as usize].iter().map(|x| x * f64::from(c.embed_scale));
    let mut stream: Vec<Vec<f64>> = tokens.iter().map(|t| embedded(t).collect()).collect();
    for (i, spec) in c.layers.iter().enumerate() {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (at, x) in stream.iter_mut().enumerate() {
            let z = normed(Role::PreFfnNorm, i, x);
            let (gate, up) = (product(Role::Gate, i, &z), product(Role::Up, i, &z));
            let gated: Vec<f64> = gate.into_iter().zip(up).map(|(g, u)| gelu(g) * u).collect();
            add(x, normed(Role::PostFfnNorm, i, &product(Role::Down, i, &gated)));
            let z = normed(Role::InputNorm, i, x);
            let (q, k) = (product(Role::Q, i, &z), product(Role::K, i, &z));
            let q = rotated(normed(Role::QNorm, i, &q), at, spec);
            keys.push(rotated(normed(Role::KNorm, i, &k), at, spec));
            values.push(k);
            let first = spec.window.map_or(0, |window| (at + 1).saturating_sub(window));
            let attended = q.chunks_exact(spec.head_dim).flat_map(|q| {
                let weight = |k: &Vec<f64>| (dot(q, k) * f64::from(spec.query_scale)).exp();
                let weights: Vec<f64> = keys[first..].iter().map(weight).collect();
                let mut mean = vec![0.0; spec.head_dim];
                for (weight, v) in weights.iter().zip(&values[first..]) {
                    let share = weight / weights.iter().sum::<f64>();
                    add(&mut mean, v.iter().map(|v| v * share).collect());
                }
                mean
            });
            let attended: Vec<f64> = attended.collect();
            add(x, normed(Role::PostAttnNorm, i, &product(Role::O, i, &attended)));
        }
    }
    stream.iter().flat_map(|x| product(Role::Embed, 0, &normed(Role::FinalNorm, 0, x))).collect()
}

fn toy() -> Config {
    let json = json!({
        "dim": 64, "ffn_dim": 96, "layers": 3, "heads": 2, "head_dim": 32, "window": 4
    });
    Toy.config(&json).unwrap()
}

/// Computes the logits of a text in passes of four tokens. The executor compares each dispatch with
/// its scalar definition.
fn computed(weights: &Weights, tokens: &[u32]) -> Vec<f32> {
    let options = CpuOptions { threads: 2, check: true, isa: None };
    let exec = Box::new(CpuExecutor::new(options).unwrap());
    let options = EngineOptions { context: 64, kv: KvFormat::F32 };
    let mut engine = PlannedEngine::new(weights, exec, options).unwrap();
    let (mut scores, mut logits) = (Scores::default(), Vec::new());
    for tokens in tokens.chunks(4) {
        engine.forward(&TokenTree::chain(tokens), Rows::All, &mut scores).unwrap();
        let path: Vec<u32> = (0..tokens.len() as u32).collect();
        gemma::engine::Engine::commit(&mut engine, &[(0, &path)]).unwrap();
        logits.extend_from_slice(&scores.logits);
    }
    logits
}

#[test]
fn a_toy_computes_its_steps() {
    let tokens: Vec<u32> = (0..11).map(|i| (7 * i + 3) % VOCAB as u32).collect();
    // Weights of floats, for which activations are not rounded.
    let weights = Weights::synthetic(toy(), |_| "f32".parse().unwrap(), 5);
    let (found, want) = (computed(&weights, &tokens), by_hand(&weights, &tokens));
    assert_eq!(found.len(), tokens.len() * VOCAB);
    let differences = found.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs());
    let worst = differences.fold(0.0, f64::max);
    assert!(worst < 1e-4, "logits differ by {worst:.2e}");
    let rounded = Weights::synthetic(toy(), |_| "i4-g32".parse().unwrap(), 5);
    assert!(computed(&rounded, &tokens).iter().all(|logit| logit.is_finite()));
}

#[test]
fn tensors_follow_from_the_steps() {
    let tensors = toy().tensors(false);
    let keys = tensors.iter().filter(|t| t.role == Role::K);
    // One matrix per layer gives keys and values.
    assert!(keys.map(|t| (t.layer, t.rows, t.cols)).eq((0..3).map(|layer| (layer, 32, 64))));
    assert!(tensors.iter().all(|t| t.role != Role::V));
}

#[test]
fn a_toy_speaks_its_dialect_and_refuses_what_it_does_not_compute() {
    let template = ChatTemplate::built_in(toy().architecture.dialect());
    let text = template.render(&[Message::new("user", "Hello")], true).unwrap();
    assert_eq!(text, "<turn>user: Hello\n");
    let fault = Toy.config(&json!({"dim": 64, "experts": 8})).unwrap_err();
    assert_eq!(fault.what, "a toy does not compute `experts`");
}
