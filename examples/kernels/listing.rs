//! Lists the kernel calls that a device would get for a model, without the device.
//!
//! [`Listing`] is the footprint of a dry executor. Loading a model onto it keeps the plans and the
//! shapes of the matrices, and [`Listing::calls`] lowers a plan for a device that is only
//! described.

use anyhow::{Context, Result};
use gemma::compute::dry::{Dry, Footprint};
use gemma::compute::{BufferId, Dispatch, KvFormat, Op, Plan, PlanId, StepLayout};
use gemma::tensor::Format;
use gemma::tensor::block::BLOCKS;
use gemma::vulkan::kernels::{Kernel, Read, Repack};
use gemma::vulkan::{
    Access, BLOCK_ROWS, Bucket, Call, Constants, DeviceInfo, DeviceMatrix, Lowering, MatrixShape,
    Own, OwnSizes, Packing, SHAPE, Shader, VulkanFootprint, best_shape, code_number,
};
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Equal calls of one kernel. They differ only in the addresses of their data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedCall {
    /// Name of the file in `shaders/`, without extension.
    pub shader: &'static str,
    /// Specialisation constants, as (id, value).
    pub constants: Vec<(u32, u32)>,
    /// Name of the operation, such as `qkv`.
    pub label: &'static str,
    /// Format, rows and columns of the matrices that it multiplies.
    pub matrices: Vec<(Format, usize, usize)>,
    /// Whether the matrices are those of experts. A row uses a few of them.
    pub experts: bool,
    pub groups: [u32; 3],
    /// Number of multiply-adds.
    pub work: u64,
    /// Bytes of weights that are read.
    pub bytes: u64,
    /// Number of these calls in the pass.
    pub count: usize,
}

/// First id of the executor's internal buffers. A plan has fewer buffers.
const OWN: u32 = 1 << 12;
/// Id of the step buffer, which a footprint is not told.
const STEP: BufferId = BufferId(OWN - 1);

/// Plans and matrices, as the executor would keep them.
struct Kept {
    footprint: VulkanFootprint,
    matrices: Vec<DeviceMatrix>,
    plans: Vec<(Plan, StepLayout)>,
    own: Option<Own>,
}

/// The calls of a device that is only described. Copies share the kept plans.
#[derive(Clone)]
pub struct Listing {
    info: DeviceInfo,
    /// Shapes of int8 matrices that the device multiplies. A real executor also checks the
    /// positions of their elements.
    shapes: Vec<MatrixShape>,
    kept: Arc<Mutex<Kept>>,
}

impl Listing {
    pub fn new(info: &DeviceInfo, shapes: &[MatrixShape]) -> Listing {
        let kept = Kept {
            footprint: VulkanFootprint::new(info),
            matrices: Vec::new(),
            plans: Vec::new(),
            own: None,
        };
        Listing { info: info.clone(), shapes: shapes.to_vec(), kept: Arc::new(Mutex::new(kept)) }
    }

    /// Returns an executor to load a model onto.
    pub fn executor(&self) -> Dry {
        Dry::new(Box::new(self.clone()))
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the calls of a plan with commands for `bucket`. Equal calls are counted.
    pub fn calls(&self, plan: PlanId, bucket: Bucket) -> Result<Vec<ListedCall>> {
        let kept = self.kept();
        let (plan, layout) = kept.plans.get(plan.0 as usize).context("no such plan")?;
        let own = kept.own.context("no plan was recorded")?;
        // The addresses differ, because matrices at one address would be merged.
        let addresses: Vec<u64> = (1..=u64::from(OWN) + 8).map(|i| i << 32).collect();
        let lowering = Lowering {
            info: &self.info,
            matrix_shape: best_shape(&self.shapes),
            known_elements: self.shapes.contains(&SHAPE) && self.info.subgroup == 32,
            addresses: &addresses,
            matrices: &kept.matrices,
            step: STEP,
            max_rows: layout.max_rows,
            finish: true,
            block_rows: BLOCK_ROWS,
            own,
        };
        let mut list: Vec<ListedCall> = Vec::new();
        for call in lowering.calls(&plan.dispatches, bucket)? {
            let listed = kept.listed(&call, &plan.dispatches[call.dispatches.clone()], own);
            let same =
                |other: &&mut ListedCall| ListedCall { count: 1, ..(**other).clone() } == listed;
            match list.iter_mut().find(same) {
                Some(same) => same.count += 1,
                None => list.push(listed),
            }
        }
        Ok(list)
    }

    /// Returns the kernels that run outside of passes: those that unpack stored codes, and the one
    /// that measures the speed of the memory.
    pub fn beside_passes() -> Vec<ListedCall> {
        let listed = |(shader, constants): (Shader, Constants)| ListedCall {
            shader: shader.file(),
            constants,
            label: "",
            matrices: Vec::new(),
            experts: false,
            groups: [1; 3],
            work: 0,
            bytes: 0,
            count: 1,
        };
        let packed = BLOCKS.iter().filter(|block| block.code.is_integer());
        let mut codes: Vec<u32> = packed.map(|block| code_number(block.code)).collect();
        codes.sort_unstable();
        codes.dedup();
        let repack = codes.into_iter().map(|code| Repack { code }.specialised());
        repack.chain([Read {}.specialised()]).map(listed).collect()
    }
}

impl Kept {
    fn listed(&self, call: &Call, dispatches: &[Dispatch], own: Own) -> ListedCall {
        let jobs = dispatches.iter().flat_map(|d| match &d.op {
            Op::Linear(op) => op.jobs.iter().map(|job| (job.weight, job.out)).collect(),
            Op::GateUp(op) => vec![(op.gate, own.gate), (op.up, own.up)],
            Op::Experts(op) => {
                let first = (op.first(), if op.is_gated() { own.gate } else { op.out });
                [first].into_iter().chain(op.second().map(|(up, _)| (up, own.up))).collect()
            }
            _ => Vec::new(),
        });
        let written = jobs.filter(|(_, out)| call.accesses.contains(&Access::Write(*out)));
        let matrices = written.map(|(weight, _)| {
            let m = &self.matrices[weight.0 as usize];
            (m.format, m.rows, m.cols)
        });
        // The gates of experts are a call without weights.
        let matrices = if call.work > 0 { matrices.collect() } else { Vec::new() };
        ListedCall {
            shader: call.shader.file(),
            constants: call.constants.clone(),
            label: call.label,
            experts: !matrices.is_empty()
                && dispatches.iter().any(|d| matches!(d.op, Op::Experts(_))),
            matrices,
            groups: call.groups,
            work: call.work,
            bytes: call.bytes,
            count: 1,
        }
    }
}

impl Footprint for Listing {
    fn weight(
        &mut self,
        label: &str,
        format: Format,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<u64>> {
        let packing = Packing::of(format, rows, cols)?;
        let codes =
            packing.map_or(format.stored_rows(rows) * format.row_bytes(cols), |p| p.bytes());
        let bytes = (codes + rows * format.row_side(cols)) as u64;
        let mut kept = self.kept();
        let codes = (kept.matrices.len() as u64 + 1) << 48;
        let side = codes + (1 << 47);
        kept.matrices.push(DeviceMatrix { format, rows, cols, codes, side, bytes });
        kept.footprint.weight(label, format, rows, cols)
    }

    fn buffer(&mut self, label: &str, bytes: usize) -> Result<u64> {
        self.kept().footprint.buffer(label, bytes)
    }

    fn recorded(&mut self, plan: &Plan, layout: StepLayout) -> Result<Vec<u64>> {
        let mut kept = self.kept();
        let old = kept.own.map(|own| own.sizes).unwrap_or_default();
        let sizes = OwnSizes::of(plan, layout, |w| kept.matrices[w.0 as usize].rows).and(old);
        let mut ids = (OWN..).map(BufferId);
        kept.own = Some(Own::of(sizes, |_| ids.next().context("ids do not end"))?);
        kept.plans.push((plan.clone(), layout));
        kept.footprint.recorded(plan, layout)
    }

    fn max_rows(&self) -> usize {
        self.info.max_rows()
    }

    fn staging(&self) -> u64 {
        0
    }

    fn key_block(&self) -> fn(KvFormat) -> usize {
        self.kept().footprint.key_block()
    }

    fn lists_best(&self) -> bool {
        self.kept().footprint.lists_best()
    }
}

/// Reads the description of a device, as printed by `scripts/check/amd/radv.py`: its features, and
/// the shapes of int8 matrices that it multiplies.
pub fn device_info(device: &Value) -> Result<(DeviceInfo, Vec<MatrixShape>)> {
    let number = |name: &str| device[name].as_u64().with_context(|| format!("{name} of {device}"));
    let is_integrated = device["integrated"].as_bool().context("integrated: true or false")?;
    let shapes: Vec<[u32; 3]> = serde_json::from_value(device["int8_matrices"].clone())
        .context("int8_matrices: [[M, N, K]]")?;
    let memory = 64 << 30;
    let info = DeviceInfo {
        backend: "vulkan",
        index: 0,
        name: device["chip"].as_str().context("chip: a name")?.to_owned(),
        driver: String::new(),
        is_cpu: false,
        is_integrated,
        api: (1, 3),
        subgroup: 32.clamp(number("min_subgroup")? as u32, number("max_subgroup")? as u32),
        asks_subgroup: device["asks_subgroup"].as_bool().context("asks_subgroup: true or false")?,
        max_shared: number("max_shared")? as u32,
        max_workgroup: number("max_workgroup")? as u32,
        max_subgroups: number("max_subgroups")? as u32,
        max_allocation: memory,
        memory,
        available: None,
        timestamp_ns: 10.0,
        busy: if is_integrated { 16 } else { 256 },
        divides_calls: true,
        offers_matrices: !shapes.is_empty(),
        draws: false,
        identity: String::new(),
        missing: Vec::new(),
    };
    Ok((info, shapes.into_iter().map(|[m, n, k]| MatrixShape { m, n, k }).collect()))
}
