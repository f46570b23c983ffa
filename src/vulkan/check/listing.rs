//! Which kernels a device would be given for a model, without the device: for whoever looks at what
//! a driver makes of them.

use crate::compute::dry::Dry;
use crate::compute::{
    BufferId, Caps, Dispatch, Executor, LoadJob, Op, Part, Plan, PlanId, Report, Reports,
    StepLayout, Storage, WeightId,
};
use crate::tensor::block::BLOCKS;
use crate::tensor::{Code, Format, Matrix};
use crate::vulkan::device::DeviceInfo;
use crate::vulkan::device::matrix::{self, MatrixShape};
use crate::vulkan::device::pipeline::{Constants, Shader};
use crate::vulkan::lower::kernels::{self, Kernel};
use crate::vulkan::lower::layout::{DeviceMatrix, Packing, code_number};
use crate::vulkan::lower::{Access, Bucket, Call, Lowering, Own};
use crate::vulkan::run::BLOCK_ROWS;
use crate::vulkan::{lower::sizes::OwnSizes, run::VulkanFootprint};
use anyhow::{Context, Result};

/// Calls of one kernel that differ in nothing but where their data lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its file in `shaders/`, without the ending.
    pub shader: &'static str,
    /// Specialisation constants, as (id, value).
    pub constants: Vec<(u32, u32)>,
    /// What the operation is called, such as `qkv`.
    pub label: &'static str,
    /// Format, rows and columns of the matrices that it multiplies.
    pub matrices: Vec<(Format, usize, usize)>,
    pub groups: [u32; 3],
    /// Multiply-adds.
    pub work: u64,
    /// Bytes of weights read.
    pub bytes: u64,
    /// How often the pass makes this call.
    pub count: usize,
}

/// An executor that keeps plans and says by which kernels a device would run them.
pub struct Listing {
    dry: Dry<VulkanFootprint>,
    info: DeviceInfo,
    /// Matrices that it multiplies; the executor also tries whether they lie as its kernels want.
    shapes: Vec<MatrixShape>,
    matrices: Vec<DeviceMatrix>,
    buffers: usize,
    plans: Vec<(Plan, BufferId, StepLayout)>,
    own: Option<Own>,
}

impl Listing {
    /// Of a device that multiplies int8 matrices of these shapes.
    pub fn new(info: &DeviceInfo, shapes: &[MatrixShape]) -> Listing {
        Listing {
            dry: Dry::new(VulkanFootprint::new(info)),
            info: info.clone(),
            shapes: shapes.to_vec(),
            matrices: Vec::new(),
            buffers: 0,
            plans: Vec::new(),
            own: None,
        }
    }

    /// The calls of a plan with commands for `bucket`, equal ones counted.
    pub fn calls(&self, plan: PlanId, bucket: Bucket) -> Result<Vec<Listed>> {
        let (plan, step, layout) = self.plans.get(plan.0 as usize).context("no such plan")?;
        let own = self.own.expect("made when the first plan was recorded");
        // Made-up addresses: equal ones would be taken for one buffer.
        let addresses: Vec<u64> = (1..=self.buffers as u64).map(|i| i << 32).collect();
        let lowering = Lowering {
            info: &self.info,
            matrix_shape: matrix::best_shape(&self.shapes),
            known_elements: self.shapes.contains(&matrix::SHAPE) && self.info.subgroup == 32,
            addresses: &addresses,
            matrices: &self.matrices,
            step: *step,
            max_rows: layout.max_rows,
            finish: true,
            block_rows: BLOCK_ROWS,
            own,
        };
        let mut list: Vec<Listed> = Vec::new();
        for call in lowering.calls(&plan.dispatches, bucket)? {
            let listed = self.listed(&call, &plan.dispatches[call.of.clone()], own);
            match list.iter_mut().find(|other| Listed { count: 1, ..(*other).clone() } == listed) {
                Some(same) => same.count += 1,
                None => list.push(listed),
            }
        }
        Ok(list)
    }

    /// Kernels beside the passes: what lays stored codes out anew, and what reads memory to see how
    /// fast it is.
    pub fn beside_passes(&self) -> Vec<Listed> {
        let of = |(shader, constants): (Shader, Constants)| Listed {
            shader: shader.file(),
            constants,
            label: "",
            matrices: Vec::new(),
            groups: [1; 3],
            work: 0,
            bytes: 0,
            count: 1,
        };
        let repack = [Code::I8, Code::I4, Code::I2, Code::I8a, Code::T2]
            .map(|code| kernels::Repack { code: code_number(code) }.specialised());
        let unpack = BLOCKS
            .iter()
            .filter_map(|block| block.ggml?.unpack)
            .map(|kind| kernels::Unpack { kind }.specialised());
        repack.into_iter().chain(unpack).chain([kernels::Read {}.specialised()]).map(of).collect()
    }

    fn listed(&self, call: &Call, of: &[Dispatch], own: Own) -> Listed {
        let jobs = of.iter().flat_map(|d| match &d.op {
            Op::Linear(op) => op.jobs.iter().map(|job| (job.weight, job.out)).collect(),
            Op::GateUp(op) => vec![(op.gate, own.gate), (op.up, own.up)],
            _ => Vec::new(),
        });
        let matrices = jobs.filter(|(_, out)| call.accesses.contains(&Access::Write(*out))).map(
            |(weight, _)| {
                let m = &self.matrices[weight.0 as usize];
                (m.format, m.rows, m.cols)
            },
        );
        Listed {
            shader: call.shader.file(),
            constants: call.constants.clone(),
            label: call.label,
            matrices: matrices.collect(),
            groups: call.groups,
            work: call.work,
            bytes: call.bytes,
            count: 1,
        }
    }
}

impl Executor for Listing {
    fn caps(&self) -> Caps {
        self.dry.caps()
    }

    fn storage(&self, part: Part) -> Storage {
        self.dry.storage(part)
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        self.buffers += 1;
        self.dry.alloc(label, bytes)
    }

    fn load(&mut self, label: &str, part: Part, matrix: &Matrix<'_>) -> Result<WeightId> {
        let (format, rows, cols) = (matrix.format, matrix.rows, matrix.cols);
        let packing = Packing::of(format, rows, cols)?;
        let codes =
            packing.map_or(format.stored_rows(rows) * format.row_bytes(cols), |p| p.bytes());
        let bytes = (codes + rows * format.row_side(cols)) as u64;
        let codes = (self.matrices.len() as u64 + 1) << 48;
        self.matrices.push(DeviceMatrix {
            format,
            rows,
            cols,
            codes,
            scales: codes + (1 << 47),
            bytes,
        });
        self.dry.load(label, part, matrix)
    }

    fn load_stored(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        self.dry.load_stored(jobs)
    }

    fn write(&mut self, _: BufferId, _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.dry.read(buffer, offset, bytes)
    }

    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId> {
        let old = self.own.map(|own| own.sizes);
        let sizes = OwnSizes::of(&plan, layout, |w| self.matrices[w.0 as usize].rows)
            .and(old.unwrap_or_default());
        self.own = Some(Own::of(sizes, |(label, bytes)| self.alloc(label, bytes))?);
        self.plans.push((plan, step, layout));
        Ok(PlanId(self.plans.len() as u32 - 1))
    }

    fn start(&mut self, plan: PlanId, result: Option<(BufferId, usize)>) -> Result<bool> {
        self.dry.start(plan, result)
    }

    fn is_busy(&self) -> bool {
        self.dry.is_busy()
    }

    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()> {
        self.dry.finish(result)
    }

    fn lend(&self, buffer: BufferId, bytes: usize) -> Option<&[u8]> {
        self.dry.lend(buffer, bytes)
    }
}

impl Reports for Listing {
    fn report(&self) -> Report {
        self.dry.report()
    }

    fn start_profile(&mut self) {
        self.dry.start_profile();
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        self.dry.read_bandwidth()
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.dry.upload_bandwidth()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::KvFormat;
    use crate::models::forward::{self, ForwardOptions, SparePages};
    use crate::models::{Config, Role, Weights};
    use crate::vulkan::device::choose::tests::device;

    /// The calls of a pass over `rows` rows of two layers in one format.
    fn pass(format: &str, shapes: &[MatrixShape], rows: usize) -> Vec<Listed> {
        let config = serde_json::json!({
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "sliding_window_pattern": 2,
            "sliding_window": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
            "query_pre_attn_scalar": 64, "vocab_size": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "max_position_embeddings": 512,
        });
        let (linear, table): (Format, Format) =
            (format.parse().unwrap(), "i8-row".parse().unwrap());
        let format = |role| if matches!(role, Role::Embed | Role::Head) { table } else { linear };
        let weights = Weights::synthetic(Config::from_json(&config).unwrap(), format, 1);
        let mut listing = Listing::new(
            &DeviceInfo {
                offers_matrices: true,
                max_shared: 64 << 10,
                ..device(0, "board", 1 << 34)
            },
            shapes,
        );
        let options = ForwardOptions {
            context: 256,
            kv: KvFormat::F16,
            max_rows: 512,
            sequences: 1,
            spare: SparePages::default(),
        };
        let model = forward::load(&weights, &mut listing, options).unwrap();
        listing.calls(model.pass, Bucket::holding(rows, rows, 0, 1, false)).unwrap()
    }

    #[test]
    fn every_matrix_is_multiplied_once_by_a_kernel_that_there_is() {
        let layer = 1024 * (4 + 2 * 2) * 128 + 4 * 128 * 1024 + 3 * 1024 * 2048;
        for format in ["bf16", "i8-row", "i4-g32", "i2-row+h128", "t3-row+h128"] {
            for rows in [1, 8, 64] {
                let calls = pass(format, &[], rows);
                let linear = calls.iter().filter(|call| !call.matrices.is_empty());
                let work: u64 = linear.map(|call| call.count as u64 * call.work).sum();
                assert_eq!(work as usize, rows * (2 * layer + 512 * 1024), "{format}, {rows} rows");
                for call in &calls {
                    let file =
                        format!("{}/shaders/{}.comp", env!("CARGO_MANIFEST_DIR"), call.shader);
                    assert!(std::path::Path::new(&file).is_file(), "{file}");
                }
            }
        }
    }

    #[test]
    fn kernels_are_those_of_the_shapes_that_a_device_multiplies() {
        let shaders = |shapes: &[MatrixShape]| -> Vec<&str> {
            let calls = pass("i4-g32", shapes, 16);
            let linear = calls
                .into_iter()
                .filter(|call| call.matrices.iter().any(|m| m.0 == Format::I4_G32));
            linear.map(|call| call.shader).collect()
        };
        assert!(shaders(&[]).iter().all(|shader| *shader == "linear"), "{:?}", shaders(&[]));
        assert!(
            shaders(&[matrix::SHAPE]).iter().all(|shader| *shader == "linear_few"),
            "{:?}",
            shaders(&[matrix::SHAPE])
        );
    }
}
