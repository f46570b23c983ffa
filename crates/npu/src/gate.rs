//! Decision whether an NPU is used: a known-answer test, which also measures speeds, and a cost
//! model.
//!
//! Attention over the cache is limited by memory bandwidth, which all parts of the chip share. The
//! NPU can only save the other executor a part of its reads, and its dispatches must cost less time
//! than that.

use super::attention::{Dims, FlashPartial, Partials};
use anyhow::{Result, ensure};
use gemma_base::kv::PAGE;
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::time::Instant;

/// Minimum predicted gain of a step for which the NPU is used, as a share of its time.
pub const WORTH: f64 = 0.03;

/// Speeds of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Bytes per second that the other executor reads, and that the NPU reads.
    pub executor: f64,
    pub npu: f64,
    /// Seconds from submitting a command until its end is seen, without the transfers.
    pub dispatch: f64,
    /// Seconds for splitting a layer: reading queries, writing partial results, and one more
    /// submission.
    pub join: f64,
}

impl Machine {
    /// A Phoenix laptop with a Radeon 780M, from published figures. The iGPU reads 75 GB/s, the NPU
    /// 26 to 28. A command of one call takes 108 to 136 us, and twice that if the host must wait
    /// for it and continue. `join` is the cost of one more submission to the iGPU.
    pub const PHOENIX: Machine =
        Machine { executor: 75e9, npu: 26e9, dispatch: 245e-6, join: 180e-6 };
}

/// The memory that a step reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepMemory {
    /// Bytes of weights.
    pub weights: f64,
    pub global_layers: usize,
    pub local_layers: usize,
    pub window: usize,
    /// Bytes of one key and one value of all heads in one layer.
    pub position: f64,
    /// Positions in the cache.
    pub context: usize,
}

impl StepMemory {
    /// Returns the bytes of the cache that global layers read, and that all layers read.
    fn bytes(&self) -> (f64, f64) {
        let global = (self.global_layers * self.context) as f64 * self.position;
        (
            global,
            global + (self.local_layers * self.window.min(self.context)) as f64 * self.position,
        )
    }

    /// Returns the seconds of all attention at this bandwidth. `layer` is added for each layer.
    pub fn attention(&self, bytes_per_second: f64, layer: f64) -> f64 {
        self.bytes().1 / bytes_per_second + (self.global_layers + self.local_layers) as f64 * layer
    }

    /// Returns the seconds of a step without the NPU.
    pub fn step(&self, m: &Machine) -> f64 {
        self.weights / m.executor + self.attention(m.executor, 0.0)
    }
}

/// The NPU's share of the sealed pages in 256ths, and the share of a step's time that it saves.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShareChoice {
    pub share: usize,
    pub gain: f64,
}

/// Returns the share with the least time. Both devices work at the same time, so the time of a
/// layer is that of the slower one.
pub fn choose(m: &Machine, w: &StepMemory) -> ShareChoice {
    let layer = w.context as f64 * w.position;
    let seconds = |share: usize| {
        let part = share as f64 / 256.0;
        let (rest, npu) = ((1.0 - part) * layer / m.executor, m.dispatch + part * layer / m.npu);
        rest.max(npu) + m.join
    };
    let best = (1..=256).min_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).expect("not empty");
    let saved = w.global_layers as f64 * (layer / m.executor - seconds(best));
    if saved > 0.0 {
        ShareChoice { share: best, gain: saved / w.step(m) }
    } else {
        ShareChoice::default()
    }
}

/// Results of the self-test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub dispatch: f64,
    /// Bytes per second of keys and values. `transfer` is measured with one row, where memory is
    /// the limit. `kernel` is measured with as many rows as a core has room for, where the kernel
    /// may be the limit.
    pub transfer: f64,
    pub kernel: f64,
    /// Largest relative L2 distance of a row from the exact result.
    pub distance: f64,
}

/// Tolerance for the kernel's distance from exact arithmetic on its bf16 inputs, as a relative L2
/// distance.
const EXACT: f64 = 0.005;
/// Pages of the known-answer test and of the measurement.
const PAGES: usize = 2;
const LARGE: usize = 16;

/// Runs the known-answer test and then measures speeds. The speeds are meaningful only on a real
/// device.
pub fn self_test(npu: &mut FlashPartial, dims: Dims) -> Result<Measured> {
    let mut rng = SmallRng::seed_from_u64(5);
    let Dims { n_heads, n_kv_heads, head_dim, .. } = dims;
    let mut random = |n: usize, size: f32| -> Vec<f32> {
        (0..n)
            .map(|_| {
                bf16::from_f32(size * (rng.random::<f32>() + rng.random::<f32>() - 1.0)).to_f32()
            })
            .collect()
    };
    let mut arena = npu.arena(LARGE)?;
    let mut pages = Vec::new();
    for _ in 0..PAGES {
        let (keys, values) =
            (random(n_kv_heads * PAGE * head_dim, 2.0), random(n_kv_heads * PAGE * head_dim, 1.0));
        npu.seal(&mut arena, &keys, &values)?;
        pages.push((keys, values));
    }
    let limits = [2, 0, 1, 2, 2];
    let q = random(limits.len() * n_heads * head_dim, 2.0);
    let mut out = Partials::default();
    npu.submit(&arena, &q, &limits)?;
    npu.join(limits.len(), &mut out)?;
    let mut distance = 0f64;
    for (row, limit) in limits.into_iter().enumerate() {
        for head in 0..n_heads {
            let at = row * n_heads + head;
            if limit == 0 {
                ensure!(out.l[at] == 0.0, "a row without pages has a sum");
                continue;
            }
            let q = &q[at * head_dim..][..head_dim];
            let want = exact(q, head / (n_heads / n_kv_heads), dims, &pages[..limit]);
            let got = out.o[at * head_dim..][..head_dim].iter().map(|o| (*o / out.l[at]) as f64);
            let (off, all) = got
                .zip(&want)
                .fold((0.0, 0.0), |(off, all), (g, w)| (off + (g - w) * (g - w), all + w * w));
            distance = distance.max((off / all).sqrt());
        }
    }
    ensure!(distance <= EXACT, "the known-answer test is {:.2} % off", 100.0 * distance);
    let zeros = vec![0.0; n_kv_heads * PAGE * head_dim];
    while arena.sealed < LARGE {
        npu.seal(&mut arena, &zeros, &zeros)?;
    }
    let full = npu.shape().rows() / (n_heads / n_kv_heads);
    let q = random(full * n_heads * head_dim, 2.0);
    let mut time = |pages: usize, rows: usize| -> Result<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..if npu.session().is_real_device() { 8 } else { 1 } {
            let start = Instant::now();
            npu.submit(&arena, &q[..rows * n_heads * head_dim], &vec![pages; rows])?;
            npu.join(rows, &mut out)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let (one, many, busy) = (time(1, 1)?, time(LARGE, 1)?, time(LARGE, full)?);
    let page = (npu.shape().page_bytes() * dims.pairs()) as f64;
    let rate = |seconds: f64| (LARGE - 1) as f64 * page / (seconds - one).max(1e-9);
    let (transfer, kernel) = (rate(many), rate(busy));
    npu.release(arena);
    npu.counters = Default::default();
    Ok(Measured { dispatch: (one - page / transfer).max(0.0), transfer, kernel, distance })
}

/// Computes the attention of one query in f64.
fn exact(q: &[f32], kv_head: usize, dims: Dims, pages: &[(Vec<f32>, Vec<f32>)]) -> Vec<f64> {
    // The kernel's input is the query after scaling and rounding.
    let round =
        |q: &f32| bf16::from_f32(q * (dims.scale * std::f32::consts::LOG2_E)).to_f32() as f64;
    let q: Vec<f64> = q.iter().map(round).collect();
    let (dim, size) = (dims.head_dim, PAGE * dims.head_dim);
    let heads =
        pages.iter().map(|(k, v)| (&k[kv_head * size..][..size], &v[kv_head * size..][..size]));
    let rows: Vec<(&[f32], &[f32])> =
        heads.flat_map(|(k, v)| k.chunks_exact(dim).zip(v.chunks_exact(dim))).collect();
    let scores: Vec<f64> =
        rows.iter().map(|(k, _)| q.iter().zip(*k).map(|(q, k)| q * *k as f64).sum()).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut out) = (0.0, vec![0.0; dim]);
    for (score, (_, v)) in scores.iter().zip(&rows) {
        let e = (score - most).exp2();
        sum += e;
        out.iter_mut().zip(*v).for_each(|(o, v)| *o += e * *v as f64);
    }
    out.iter_mut().for_each(|o| *o /= sum);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the reads of Gemma 3 27B with f16 keys and values at 2 bits per weight, where
    /// attention has its largest share.
    fn work(context: usize) -> StepMemory {
        StepMemory {
            weights: 8.4e9,
            global_layers: 10,
            local_layers: 52,
            window: 1024,
            position: 8192.0,
            context,
        }
    }

    /// "Whole attention at 8k context: iGPU 15 ms, CPU 42, NPU 58; per-layer dispatch alone about
    /// 15."
    #[test]
    fn whole_attention_is_slower_on_the_npu() {
        let (m, w) = (Machine::PHOENIX, work(8192));
        let ms = |seconds: f64| (seconds * 1e3).round();
        assert_eq!(ms(w.attention(m.executor, 0.0)), 15.0);
        assert_eq!(ms(w.attention(26.4e9, 0.0)), 42.0);
        assert_eq!(ms(w.attention(m.npu, m.dispatch)), 58.0);
        assert_eq!(ms(62.0 * m.dispatch), 15.0);
    }

    /// "Modelled gain of a verify step: 0 at 8k, up to 4.4 % at 32k with f16 KV."
    #[test]
    fn a_share_of_the_global_layers_pays_at_long_contexts_only() {
        let m = Machine::PHOENIX;
        assert_eq!(choose(&m, &work(8192)), ShareChoice::default());
        let far = choose(&m, &work(32768));
        assert_eq!((far.gain * 1000.0).round(), 44.0, "{far:?}");
        assert!((40..90).contains(&far.share), "{far:?}");
        // More bits per weight reduce the gain. So do int8 keys and values, which have half the
        // bytes.
        let heavy = StepMemory { weights: 14e9, ..work(32768) };
        let small = StepMemory { position: 4352.0, ..work(32768) };
        assert!(choose(&m, &heavy).gain < far.gain && choose(&m, &small).gain < far.gain);
        let on = |context| choose(&m, &work(context)).gain >= WORTH;
        assert_eq!([512, 4096, 8192, 16384, 32768].map(on), [false, false, false, false, true]);
        let gains: Vec<f64> = (1..=64).map(|k| choose(&m, &work(1024 * k)).gain).collect();
        assert!(gains.windows(2).all(|g| g[0] <= g[1]), "{gains:?}");
    }

    #[test]
    fn a_slow_or_late_npu_is_left_alone() {
        let (m, w) = (Machine::PHOENIX, work(32768));
        assert_eq!(choose(&Machine { dispatch: 10e-3, ..m }, &w).share, 0);
        assert!(choose(&Machine { npu: 7e9, ..m }, &w).gain < WORTH);
        assert_eq!(choose(&Machine { join: 5e-3, ..m }, &w), ShareChoice::default());
        // A slower executor, such as the CPU, gains more.
        assert!(choose(&Machine { executor: 40e9, ..m }, &w).gain > choose(&m, &w).gain);
    }
}
