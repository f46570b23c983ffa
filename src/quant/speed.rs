//! How fast a file is on a device that may not be here: by `quant/costs.toml`, which says for each
//! device what a weight of each format takes.
//!
//! A pass takes the longer of two: reading its bytes, and what its weights take together. So formats
//! can be chosen for a device ([`allocate_for`]): those of the least product of divergence and time,
//! among all that a number of bytes allows. A tenth less time is worth a tenth more divergence.

use super::allocate::{Candidate, allocate};
use super::layout::{Layout, Target};
use crate::checkpoint::Dtype;
use crate::gemma::{Role, Weights};
use crate::tensor::Format;
use anyhow::Result;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::Add;
use std::sync::LazyLock;

/// What a file can be made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A laptop's graphics chip, which shares the processor's memory.
    Laptop,
    /// A graphics card with memory of its own.
    Gpu,
    Cpu,
}

impl DeviceKind {
    pub const ALL: [DeviceKind; 3] = [DeviceKind::Laptop, DeviceKind::Gpu, DeviceKind::Cpu];

    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Laptop => "laptop",
            DeviceKind::Gpu => "gpu",
            DeviceKind::Cpu => "cpu",
        }
    }

    /// What formats cost there.
    pub fn costs(self) -> &'static Costs {
        static TABLE: LazyLock<BTreeMap<String, Costs>> = LazyLock::new(|| {
            toml::from_str(include_str!("../../quant/costs.toml")).expect("a file of our own")
        });
        &TABLE[self.name()]
    }
}

impl std::str::FromStr for DeviceKind {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<DeviceKind> {
        let found = DeviceKind::ALL.into_iter().find(|device| device.name() == text);
        found.ok_or_else(|| anyhow::anyhow!("`{text}` is no device: laptop, gpu or cpu"))
    }
}

/// Passes that are counted: of one row, of 16 rows, and that of a prompt, for each of its tokens.
const PASSES: usize = 3;
/// Tokens of a prompt that are read in a pass.
const PROMPT_ROWS: f64 = 128.0;
/// How often each is done for [`Times::work`].
const WORK: [f64; PASSES] = [100.0, 100.0, 500.0];
/// Of [`allocate_for`].
const MULTIPLES: [f64; 4] = [1.0, 4.0, 16.0, 64.0];
const REFINEMENTS: usize = 2;

/// What formats cost on a device.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Costs {
    /// The device that it was found on.
    pub about: String,
    /// `modelled` or `measured`.
    pub how: String,
    /// Speed of the memory, 1e9 bytes a second.
    pub gb_per_s: f64,
    /// Picoseconds a weight by format, without a Hadamard: see the file.
    pub ps: BTreeMap<String, [f64; PASSES]>,
}

impl Costs {
    /// What a format costs besides the reading of its bytes; `None` where nobody knows.
    pub fn known(&self, format: Format) -> Option<[f64; PASSES]> {
        self.ps.get(&Format { hadamard: false, ..format }.to_string()).copied()
    }

    /// The least that any format costs.
    fn least(&self) -> [f64; PASSES] {
        let least = |pass: usize| self.ps.values().map(|c| c[pass]).fold(f64::INFINITY, f64::min);
        std::array::from_fn(|pass| if self.ps.is_empty() { 0.0 } else { least(pass) })
    }

    /// What a matrix of a layer, or the output head, adds to the passes.
    pub fn times(&self, format: Format, rows: usize, cols: usize, is_head: bool) -> Times {
        let (bytes, weights) = (format.bytes(rows, cols) as f64, (rows * cols) as f64);
        let read = bytes / (self.gb_per_s * 1e9);
        let ps = self.known(format);
        let costs = ps.unwrap_or_else(|| self.least());
        let mut times = Times {
            memory: [read, read, read / PROMPT_ROWS],
            compute: costs.map(|ps| weights * ps * 1e-12),
            weights,
            known: if ps.is_some() { weights } else { 0.0 },
        };
        if is_head {
            // Of a prompt the last token alone asks for it.
            (times.memory[2], times.compute[2]) = (0.0, 0.0);
        }
        times
    }

    /// What passes over a model of these formats take.
    pub fn of_layout(&self, layout: &Layout) -> Times {
        let matrices = layout.entries.iter().map(|e| (e.role, stored(e.target), e.rows, e.cols));
        self.of_matrices(matrices)
    }

    /// The same of a model that is there.
    pub fn of_weights(&self, weights: &Weights) -> Result<Times> {
        let matrices = weights.roles().into_iter().filter(|(role, _)| role.is_matrix());
        let found = matrices.map(|(role, layer)| {
            let [rows, cols] = role.shape(weights.config());
            Ok((role, weights.format(role, layer)?, rows, cols))
        });
        let found: Vec<_> = found.collect::<Result<_>>()?;
        Ok(self.of_matrices(found.into_iter()))
    }

    fn of_matrices(
        &self,
        matrices: impl Iterator<Item = (Role, Format, usize, usize)> + Clone,
    ) -> Times {
        let own_head = matrices.clone().any(|m| m.0 == Role::Head);
        let part = |(role, format, rows, cols)| match reads(role, own_head) {
            Reads::Nothing => Times::default(),
            reads => self.times(format, rows, cols, reads == Reads::Head),
        };
        matrices.map(part).sum()
    }
}

/// What passes read of a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    Nothing,
    Layer,
    Head,
}

/// `own_head`: whether the output head is another tensor than the embedding table, of which passes
/// read single rows only.
pub fn reads(role: Role, own_head: bool) -> Reads {
    match role {
        Role::Embed if own_head => Reads::Nothing,
        Role::Embed | Role::Head => Reads::Head,
        _ if role.is_matrix() => Reads::Layer,
        _ => Reads::Nothing,
    }
}

/// The format of what is stored.
pub fn stored(target: Target) -> Format {
    match target {
        Target::Format(format) => format,
        Target::AsIs(Dtype::F32) => Format::F32,
        // The other types have two bytes too.
        Target::AsIs(_) => Format::BF16,
    }
}

/// What some matrices add to the passes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    memory: [f64; PASSES],
    compute: [f64; PASSES],
    weights: f64,
    /// Weights whose format has a figure.
    known: f64,
}

impl Add for Times {
    type Output = Times;

    fn add(self, other: Times) -> Times {
        let both = |a: [f64; PASSES], b: [f64; PASSES]| std::array::from_fn(|i| a[i] + b[i]);
        Times {
            memory: both(self.memory, other.memory),
            compute: both(self.compute, other.compute),
            weights: self.weights + other.weights,
            known: self.known + other.known,
        }
    }
}

impl Sum for Times {
    fn sum<I: Iterator<Item = Times>>(parts: I) -> Times {
        parts.fold(Times::default(), Add::add)
    }
}

impl Times {
    /// Seconds of a pass of one row, of 16 rows, and of a token of a prompt.
    pub fn seconds(&self) -> [f64; PASSES] {
        std::array::from_fn(|pass| self.memory[pass].max(self.compute[pass]))
    }

    /// Tokens a second without drafts.
    pub fn decode(&self) -> f64 {
        1.0 / self.seconds()[0]
    }

    /// A pass of 16 rows in passes of one.
    pub fn c16(&self) -> f64 {
        self.seconds()[1] / self.seconds()[0]
    }

    /// Tokens of a prompt a second.
    pub fn prefill(&self) -> f64 {
        1.0 / self.seconds()[2]
    }

    /// Share of the weights whose format has a figure.
    pub fn known(&self) -> f64 {
        if self.weights > 0.0 { self.known / self.weights } else { 0.0 }
    }

    /// Seconds of an answer of some length: 100 passes of one row, 100 of 16 rows, and 500 tokens
    /// of a prompt.
    pub fn work(&self) -> f64 {
        self.seconds().iter().zip(WORK).map(|(seconds, times)| seconds * times).sum()
    }

    /// What a second of each pass's arithmetic adds to the work: nothing where reading takes longer.
    fn slopes(&self) -> [f64; PASSES] {
        let bound = |pass: usize| self.compute[pass] > self.memory[pass];
        std::array::from_fn(|pass| if bound(pass) { WORK[pass] } else { 0.0 })
    }
}

/// A tensor to choose a format for, and what it adds to the passes in each.
pub struct Timed {
    pub candidate: Candidate,
    /// One for each option.
    pub times: Vec<Times>,
}

/// The formats of at most `budget` bytes with the least product of divergence and time, one for each
/// tensor; `fixed` is what the rest of the model has of both.
///
/// A price for a second of arithmetic makes one sum of both, whose least is found exactly. The choice
/// without a price says what a second is worth; that and some multiples of it are tried, since a
/// product may have several valleys, and then what it is worth in the best of them. `None` where even
/// the smallest formats do not fit.
pub fn allocate_for(tensors: &[Timed], fixed: (f64, Times), budget: u64) -> Option<Vec<Format>> {
    let choose = |price: [f64; PASSES]| {
        let priced: Vec<Candidate> = tensors.iter().map(|t| at_price(t, price)).collect();
        Some(Chosen::of(tensors, fixed, allocate(&priced, budget)?))
    };
    let mut best = choose([0.0; PASSES])?;
    let worth = best.worth;
    for times in MULTIPLES {
        best = best.or_better(choose(worth.map(|w| w * times))?);
    }
    for _ in 0..REFINEMENTS {
        best = choose(best.worth)?.or_better(best);
    }
    Some(best.formats)
}

/// A choice of formats.
struct Chosen {
    formats: Vec<Format>,
    /// Divergence times time.
    product: f64,
    /// What a second of each pass's arithmetic is worth, in divergence.
    worth: [f64; PASSES],
}

impl Chosen {
    fn of(tensors: &[Timed], fixed: (f64, Times), formats: Vec<Format>) -> Chosen {
        let (kld, times) = tensors.iter().zip(&formats).fold(fixed, |(kld, times), (t, format)| {
            let at = t.candidate.options.iter().position(|o| o.format == *format).unwrap_or(0);
            (kld + t.candidate.weight * t.candidate.options[at].distortion, times + t.times[at])
        });
        let work = times.work().max(f64::MIN_POSITIVE);
        let worth = times.slopes().map(|slope| slope * kld / work);
        Chosen { formats, product: kld * work, worth }
    }

    fn or_better(self, other: Chosen) -> Chosen {
        if other.product < self.product { other } else { self }
    }
}

/// The tensor with the price of its time added to its divergence.
fn at_price(tensor: &Timed, price: [f64; PASSES]) -> Candidate {
    let Timed { candidate, times } = tensor;
    let mut options = candidate.options.clone();
    for (option, times) in options.iter_mut().zip(times) {
        let time: f64 =
            times.compute.iter().zip(price).map(|(seconds, price)| seconds * price).sum();
        option.distortion = candidate.weight * option.distortion + time;
    }
    Candidate { weight: 1.0, options }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::allocate::Rate;
    use proptest::prelude::*;

    fn format(name: &str) -> Format {
        name.parse().unwrap()
    }

    fn costs(lines: &[(&str, [f64; PASSES])]) -> Costs {
        let ps = lines.iter().map(|(name, ps)| (name.to_string(), *ps)).collect();
        Costs { about: "made up".into(), how: "measured".into(), gb_per_s: 100.0, ps }
    }

    /// Layers of a size, each with these formats to choose from.
    fn layers(costs: &Costs, names: &[&str], weights: &[f64]) -> Vec<Timed> {
        const SIZE: usize = 1024;
        let rate = |name: &&str| {
            let format = format(name);
            let bytes = format.bytes(SIZE, SIZE) as u64;
            Rate { format, bytes, distortion: format.distortion() }
        };
        let options: Vec<Rate> = names.iter().map(rate).collect();
        let times: Vec<Times> =
            options.iter().map(|o| costs.times(o.format, SIZE, SIZE, false)).collect();
        let timed = |&weight: &f64| Timed {
            candidate: Candidate { weight, options: options.clone() },
            times: times.clone(),
        };
        weights.iter().map(timed).collect()
    }

    fn spent(tensors: &[Timed], formats: &[Format]) -> (f64, Times, u64) {
        tensors.iter().zip(formats).fold((0.0, Times::default(), 0), |sum, (t, format)| {
            let at = t.candidate.options.iter().position(|o| o.format == *format).unwrap();
            let option = t.candidate.options[at];
            let kld = t.candidate.weight * option.distortion;
            (sum.0 + kld, sum.1 + t.times[at], sum.2 + option.bytes)
        })
    }

    const NAMES: [&str; 4] = ["i4-row", "t4-row", "t3-row", "t2-row"];
    const FREE: f64 = 1e-3;

    #[test]
    fn every_device_has_a_table_that_names_formats() {
        for device in DeviceKind::ALL {
            let costs = device.costs();
            assert!(["modelled", "measured"].contains(&costs.how.as_str()));
            assert!(costs.gb_per_s > 10.0 && !costs.about.is_empty() && !costs.ps.is_empty());
            for (name, ps) in &costs.ps {
                let known = format(name);
                assert_eq!((known.to_string(), known.hadamard), (name.clone(), false));
                assert!(ps.iter().all(|ps| *ps > 0.0) && ps[1] >= ps[0], "{name}: {ps:?}");
                let behind = Format { hadamard: true, ..known };
                assert_eq!(costs.known(behind), Some(*ps));
            }
            assert_eq!(device.name().parse::<DeviceKind>().unwrap(), device);
        }
        assert!("phone".parse::<DeviceKind>().is_err());
    }

    /// Bytes bound a pass whose arithmetic is cheap; arithmetic bounds the others; a format without
    /// a figure costs what the cheapest does, and is said to be unknown.
    #[test]
    fn a_pass_takes_the_longer_of_bytes_and_arithmetic() {
        let costs = costs(&[("i4-row", [1.0, 16.0, 2.0]), ("i8-row", [3.0, 9.0, 1.0])]);
        let weights = 1024.0 * 1024.0;
        let times = costs.times(format("i4-row+h128"), 1024, 1024, false);
        let bytes = format("i4-row").bytes(1024, 1024) as f64;
        let [one, sixteen, prompt] = times.seconds();
        assert_eq!(one, bytes / 100e9);
        assert_eq!((sixteen, prompt), (weights * 16.0 * 1e-12, weights * 2.0 * 1e-12));
        assert_eq!((times.known(), times.c16()), (1.0, sixteen / one));
        let unknown = costs.times(format("t3-row"), 1024, 1024, false);
        assert_eq!(unknown.known(), 0.0);
        assert_eq!(unknown.seconds()[1..], [weights * 9.0 * 1e-12, weights * 1e-12]);
        // A prompt asks the head for one token.
        let head = costs.times(format("i8-row"), 1024, 1024, true);
        assert_eq!(head.seconds()[2], 0.0);
        assert_eq!((times + head).weights, 2.0 * weights);
    }

    /// The same bytes and another table give another choice, and each is the better one by its own.
    #[test]
    fn what_is_slow_on_a_device_is_left_out_there() {
        let free = [FREE; PASSES];
        let slow = [FREE, 100.0, 10.0];
        let of = |t4: [f64; PASSES], i4: [f64; PASSES]| {
            costs(&[("t4-row", t4), ("i4-row", i4), ("t3-row", free), ("t2-row", free)])
        };
        let (quick, sluggish) = (of(free, free), of(slow, free));
        let choose = |costs: &Costs| {
            let tensors = layers(costs, &NAMES, &[1.0; 8]);
            let budget = 8 * format("t4-row").bytes(1024, 1024) as u64;
            allocate_for(&tensors, (0.0, Times::default()), budget).unwrap()
        };
        assert!(choose(&quick).iter().all(|f| *f == format("t4-row")));
        assert!(choose(&sluggish).iter().all(|f| *f == format("i4-row")));
        for (here, there) in [(&quick, &sluggish), (&sluggish, &quick)] {
            let tensors = layers(here, &NAMES, &[1.0; 8]);
            let product = |formats: &[Format]| {
                let (kld, times, _) = spent(&tensors, formats);
                kld * times.work()
            };
            assert!(product(&choose(here)) < product(&choose(there)));
        }
    }

    proptest! {
        /// Never over the budget, never worse than the choice without speed by its own measure, and
        /// the same each time.
        #[test]
        fn speed_never_costs_bytes(
            ps in proptest::collection::vec(proptest::array::uniform3(0.001..60.0f64), 4),
            weights in proptest::collection::vec(0.1..3.0f64, 1..12),
            share in 0.0..1.0f64,
        ) {
            let lines: Vec<_> = NAMES.into_iter().zip(ps).collect();
            let costs = costs(&lines);
            let tensors = layers(&costs, &NAMES, &weights);
            let bytes = |name: &str| (weights.len() * format(name).bytes(1024, 1024)) as f64;
            let budget = bytes("t2-row") + share * (bytes("i4-row") - bytes("t2-row"));
            let fixed = (0.01, Times::default());
            let found = allocate_for(&tensors, fixed, budget as u64).unwrap();
            prop_assert_eq!(&allocate_for(&tensors, fixed, budget as u64).unwrap(), &found);
            let (kld, times, bytes) = spent(&tensors, &found);
            prop_assert!(bytes <= budget as u64);
            let plain: Vec<Candidate> = tensors.iter().map(|t| t.candidate.clone()).collect();
            let plain = allocate(&plain, budget as u64).unwrap();
            let (plain_kld, plain_times, _) = spent(&tensors, &plain);
            prop_assert!(
                (kld + 0.01) * times.work() <= (plain_kld + 0.01) * plain_times.work() * (1.0 + 1e-9)
            );
            prop_assert!(allocate_for(&tensors, fixed, 1000).is_none());
        }
    }
}
