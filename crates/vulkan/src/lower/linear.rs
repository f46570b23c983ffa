//! Kernel calls of linear layers: selection of the kernel and its shape.

use super::kernels::{self, Kernel, LinearPush, Matrix, PathTrellis, Push, Specialise, word};
use super::layout::{DeviceMatrix, Packing, code_number, side_number};
use super::{Access, Bucket, Call, Lowering, MOST_GROUPS};
use crate::device::pipeline::{Constants, Shader};
use anyhow::Result;
use bytemuck::Zeroable;
use gemma_base::compute::{Act, BufferId, LinearJob, RowSet};
use gemma_base::tensor::trellis::{TILE, Trellis};
use gemma_base::tensor::{Code, Format, Group};

/// Least rows of activations for matrix instructions: for most codes, and for trellis codes.
/// Trellis codes are so slow to decode that unused matrix columns cost less than the dot products
/// of more than two rows.
const MATRIX_ROWS: usize = 8;
const TRELLIS_MATRIX_ROWS: usize = 3;
/// Most rows of activations per subgroup.
const FEW_ROWS: usize = 32;

/// Most threads of a workgroup with matrix instructions.
const THREADS: u32 = 256;
/// Most bytes of its shared memory.
const SHARED: u32 = 48 << 10;
/// Most tiles of eight rows of activations in `linear_many`, and matrix rows per workgroup.
const MANY_TILES: u32 = 8;
const MANY_ROWS: usize = 64;
/// Most floats that its workgroup computes.
pub(super) const MANY_FLOATS: usize = 8 * MANY_TILES as usize * MANY_ROWS;
/// Matrix rows per subgroup in `linear_matrix`, and columns that it unpacks at once.
const MATRIX_BLOCK: usize = 16;
const MATRIX_CHUNK: usize = 128;
/// Most subgroups of a workgroup in `linear_matrix`. More subgroups would mean fewer workgroups.
const MATRIX_SUBGROUPS: usize = 4;
/// Bytes of shared memory reserved for the rotation of heads: four subgroups, 256 channels.
const HEAD_SHARED: usize = 4 << 10;

/// Subgroups of a workgroup with a norm as its epilogue, which share the row.
pub(super) const NORM_TEAMS: u32 = 16;
/// Parts of a row, as in `shaders/include/codes.glsl`, and most bytes of shared memory in which
/// `linear` adds them up.
const PARTS: u32 = 16;
const JOIN_SHARED: u32 = 8 << 10;

/// A kernel of a linear layer: shader, constants, and the rows of activations (`block`) and of the
/// matrix (`rows`) per workgroup.
pub(super) struct LinearShape {
    pub shader: Shader,
    pub constants: Constants,
    pub block: usize,
    pub rows: usize,
}

impl LinearShape {
    fn of(kernel: &impl Kernel<Push = LinearPush>, block: usize, rows: usize) -> LinearShape {
        let (shader, constants) = kernel.specialised();
        LinearShape { shader, constants, block, rows }
    }

    /// Adds the constants for codes of this trellis.
    fn through(mut self, trellis: Option<Trellis>) -> LinearShape {
        if let Some(Trellis { step, multiplier, .. }) = trellis {
            self.constants.extend(PathTrellis { step, multiplier }.constants());
        }
        self
    }
}

impl LinearPush {
    /// Adds another call's matrix on the same activations. Returns whether there was room.
    fn merge(&mut self, other: &LinearPush) -> bool {
        let same = (self.x, self.sx, self.sums, self.step, self.steps, self.stride)
            == (other.x, other.sx, other.sums, other.step, other.steps, other.stride);
        let mut rows: [u16; 2] = bytemuck::cast(self.more_n);
        let free = rows.iter().position(|n| *n == 0);
        let (true, Some(i), Ok(n), 0) = (same, free, u16::try_from(other.n), other.more_n) else {
            return false;
        };
        rows[i] = n;
        self.more_n = bytemuck::cast(rows);
        self.more[i] = Matrix { codes: other.codes, side: other.side, out: other.out };
        true
    }
}

impl Lowering<'_> {
    /// Returns the call of one linear layer. With `norm`, a norm may become its epilogue.
    pub(super) fn linear(
        &self,
        job: &LinearJob,
        rows: RowSet,
        bucket: Bucket,
        norm: bool,
    ) -> Result<Call> {
        let (m, act) = (self.matrix(job.weight), &job.act);
        let selected = rows == RowSet::Selected;
        let live = bucket.of(rows);
        let accesses = vec![
            Access::Read(act.values),
            Access::Read(act.scales),
            Access::Read(act.sums),
            Access::Write(job.out),
        ];
        let packing = Packing::of(m.format, m.rows, m.cols)?;
        let shape = match &packing {
            None => self.float_shape(m, live, selected, norm),
            Some(p) => {
                let known = self.known_shape(m.format, m.cols, p, live, selected);
                let matrix = || self.matrix_shape(m.format, m.cols, p, live, selected);
                known.or_else(matrix).unwrap_or_else(|| match m.format.code.trellis() {
                    Some(trellis) => self.trellis_shape(trellis, live, selected, norm),
                    None => self.dot_shape(m, p, live, selected, norm),
                })
            }
        };
        let push = self.linear_push(m, packing.as_ref(), act, job.out);
        let groups = [live.div_ceil(shape.block), m.rows.div_ceil(shape.rows), 1];
        Ok(Call {
            shader: shape.shader,
            constants: shape.constants,
            push: Push::of(&push),
            linear: Some((push, shape.rows)),
            epilogue: None,
            groups: groups.map(word),
            accesses,
            bytes: m.bytes,
            work: (m.rows * m.cols * live) as u64,
            label: "",
            dispatches: 0..0,
        })
    }

    /// Returns the arguments for a single matrix.
    pub(super) fn linear_push(
        &self,
        m: &DeviceMatrix,
        packing: Option<&Packing>,
        act: &Act,
        out: BufferId,
    ) -> LinearPush {
        LinearPush {
            codes: m.codes,
            side: m.side,
            out: self.at(out),
            x: self.at(act.values),
            sx: self.at(act.scales),
            sums: self.at(act.sums),
            step: self.at(self.step),
            n: word(m.rows),
            // For floats, a step is a column.
            steps: word(packing.map_or(m.cols, |p| p.steps)),
            stride: word(act.cols * if act.format.int8 { 1 } else { 4 }),
            ..LinearPush::zeroed()
        }
    }

    /// Returns the kernel for up to `block` slots of an expert. `m` is the matrix of one expert.
    pub(super) fn slot_shape(
        &self,
        m: &DeviceMatrix,
        packing: Option<&Packing>,
        block: usize,
    ) -> LinearShape {
        let Some(p) = packing else { return self.float_shape(m, block, false, false) };
        let grouped = m.format.group != Group::Row;
        let known = match self.known_shape(m.format, m.cols, p, block, false) {
            // Fewer tiles waste less work in incomplete blocks.
            _ if grouped && block >= FEW_ROWS => {
                self.many_shape(m.format, p, word(block) / 8, false)
            }
            known => known,
        };
        known.unwrap_or_else(|| match m.format.code.trellis() {
            Some(trellis) => self.trellis_shape(trellis, block, false, false),
            None => self.dot_shape(m, p, block, false, false),
        })
    }

    /// Returns the kernel for float weights and any number of rows.
    fn float_shape(
        &self,
        m: &DeviceMatrix,
        live: usize,
        selected: bool,
        norm: bool,
    ) -> LinearShape {
        let (sg, block) = (self.info.subgroup, live.clamp(1, 4));
        let threads = if norm { NORM_TEAMS * sg.min(32) } else { 128 }.max(sg);
        // A subgroup processes one matrix row. A large table needs larger workgroups to stay within
        // the limit on workgroups per dispatch.
        let least = word(m.rows).div_ceil(MOST_GROUPS).next_power_of_two() * sg;
        let threads = threads.max(least);
        // A row of activations is loaded once for several matrix rows.
        let each = if live > FEW_ROWS { 4 } else { 1 };
        let kernel = kernels::LinearFloat {
            local: threads,
            subgroup: sg,
            rows: word(block),
            bf16: m.format.code == Code::Bf16,
            matrix_rows: each,
            selected,
            threads,
        };
        LinearShape::of(&kernel, block, (threads / sg * each) as usize)
    }

    /// Returns the kernel for trellis codes with dot products and any number of rows.
    fn trellis_shape(
        &self,
        trellis: Trellis,
        live: usize,
        selected: bool,
        norm: bool,
    ) -> LinearShape {
        let sg = self.info.subgroup;
        let block = live.clamp(1, self.block_rows.min(4));
        let threads = if norm { NORM_TEAMS * sg.min(32) } else { 128 }.max(sg);
        let kernel = kernels::LinearTrellis {
            local: threads,
            subgroup: sg,
            threads,
            rows: word(block),
            selected,
        };
        LinearShape::of(&kernel, block, TILE).through(Some(trellis))
    }

    /// Returns the kernel for other integer codes with dot products and any number of rows.
    fn dot_shape(
        &self,
        m: &DeviceMatrix,
        p: &Packing,
        live: usize,
        selected: bool,
        norm: bool,
    ) -> LinearShape {
        let DeviceMatrix { format, rows, cols, .. } = *m;
        let (sg, grouped) = (self.info.subgroup, format.group != Group::Row);
        let block = live.clamp(1, 16);
        // Loads in flight hide latency. Several scales per element of the side need more registers,
        // and with many rows the unrolled loop over steps would be too long.
        let one_scale = !grouped || format.code.spec().side.groups() == 1;
        let at_once = match block {
            1 | 2 if one_scale => p.chunk(),
            ..=4 => p.chunk().min(2),
            _ => 1,
        };
        // A row of activations is loaded once for `each` matrix rows. A thread keeps sums of up to
        // 64 pairs of rows, and the operands of up to 128 columns.
        let each = match block {
            1 | 2 => 1,
            4 => 2,
            // Smaller tasks balance the load better if there are few long rows.
            8 if cols >= 2 * rows => 2,
            _ => 4,
        };
        let each = each.min(word(MATRIX_CHUNK / at_once / p.width).max(1));
        // The subgroups of a team add up their sums in shared memory.
        let shares = PARTS / (sg / 8).clamp(1, PARTS);
        let each = each.min((JOIN_SHARED / (shares * 8 * word(block) * 4)).max(1));
        let team = 8 * PARTS;
        let teams = if norm { (NORM_TEAMS * sg.min(32)).div_ceil(team) } else { 1 };
        let threads = teams * team;
        let kernel = kernels::Linear {
            local: threads,
            subgroup: sg,
            rows: word(block),
            matrix_rows: each,
            code: code_number(format.code),
            width: word(p.width),
            grouped,
            at_once: word(at_once),
            selected,
            threads,
            side: side_number(format.code),
            partial: !p.steps.is_multiple_of(p.chunk()),
        };
        LinearShape::of(&kernel, block, (teams * each * 8) as usize)
    }

    /// Returns the kernel for matrix instructions of any shape; `None` for too few rows.
    fn matrix_shape(
        &self,
        format: Format,
        cols: usize,
        p: &Packing,
        live: usize,
        selected: bool,
    ) -> Option<LinearShape> {
        let (device, info, sg) = (self.matrix_shape?, self.info, self.info.subgroup as usize);
        let (nn, grouped) = (device.n as usize, format.group != Group::Row);
        let (chunk, k) = (MATRIX_CHUNK, device.k as usize);
        // With groups, a chunk must be a group. Without groups, a chunk must have whole steps.
        let whole = if grouped { p.width == chunk } else { chunk.is_multiple_of(p.width) };
        let least = match format.code.is_trellis() {
            true => TRELLIS_MATRIX_ROWS,
            false => MATRIX_ROWS,
        };
        if !(whole && cols.is_multiple_of(k)) || live < least {
            return None;
        }
        // Groups need several sums per element of a product, so fewer rows fit.
        let many = live > FEW_ROWS && !grouped;
        let block = live.next_multiple_of(nn).min(if many { 128 } else { FEW_ROWS });
        // Bytes of shared memory per subgroup, and for the activations.
        let row = chunk + 16;
        let own = (MATRIX_BLOCK * row).max(MATRIX_BLOCK * nn * 4)
            + grouped as usize * 4 * (MATRIX_BLOCK + block);
        let (fixed, each) = if many { (block * row, own) } else { (0, own + block * row) };
        let most = (info.max_shared as usize).saturating_sub(HEAD_SHARED + fixed) / each;
        let most = most
            .min(info.max_workgroup as usize / sg)
            .min(info.max_subgroups as usize)
            .min(MATRIX_SUBGROUPS);
        let chunks = cols.div_ceil(chunk);
        let subgroups = match most {
            0 => return None,
            // The subgroups divide the parts of a group's sums, or many rows, evenly.
            most if grouped || many => 1 << most.ilog2(),
            // The fewest subgroups that need no more rounds over the chunks of a row.
            most => chunks.div_ceil(chunks.div_ceil(most)),
        };
        // A subgroup holds the sums of at most eight of the 16 parts.
        if grouped && subgroups < 2 {
            return None;
        }
        let threads = word(subgroups * sg);
        let kernel = kernels::LinearMatrix {
            local: threads,
            subgroup: self.info.subgroup,
            tiles: word(block / nn),
            code: code_number(format.code),
            width: word(p.width),
            grouped,
            many,
            selected,
            threads,
            shape_m: device.m,
            shape_n: device.n,
            shape_k: device.k,
        };
        let rows = MATRIX_BLOCK * if many { subgroups } else { 1 };
        let mut shape = LinearShape::of(&kernel, block, rows).through(format.code.trellis());
        // Matrix shapes with k = 8 have a separate shader.
        if device.k == 8 {
            shape.shader = Shader::LinearMatrixK8;
        }
        Some(shape)
    }

    /// Returns the kernel for matrix instructions with a known placement of elements. `None` if
    /// device or matrix do not allow it, or for too few rows.
    fn known_shape(
        &self,
        format: Format,
        cols: usize,
        p: &Packing,
        live: usize,
        selected: bool,
    ) -> Option<LinearShape> {
        let grouped = format.group != Group::Row;
        // The kernels load four steps of 32 columns at once.
        if !(self.known_elements && cols.is_multiple_of(128) && self.has_room())
            || live < MATRIX_ROWS
        {
            return None;
        }
        // The shapes were tuned by measurement, see docs/NOTES.md.
        let tiles = word(live.div_ceil(8).next_power_of_two());
        // With several scales per element, `linear_few` is not faster from two tiles on.
        let most = if format.code.spec().side.groups() == 1 { 2 } else { 1 };
        if grouped && tiles > most {
            return self.many_shape(format, p, tiles.min(MANY_TILES), selected);
        }
        // With one scale per row, `linear_matrix` is equally fast, except for few rows of i4.
        let few = grouped || format.code == Code::I4 && live <= FEW_ROWS;
        if !(few && p.width == 32) {
            return None;
        }
        // The subgroup's sums are of 32 rows of activations or of 64 matrix rows.
        let matrix_tiles = if tiles < 4 { 4 } else { 2 };
        let kernel = kernels::LinearFew {
            local: THREADS,
            tiles,
            matrix_tiles,
            code: code_number(format.code),
            grouped,
            selected,
            side: side_number(format.code),
        };
        Some(LinearShape::of(&kernel, 8 * tiles as usize, 16 * matrix_tiles as usize))
    }

    /// Returns the kernel for many rows in groups, with `tiles` tiles of eight rows. `None` if the
    /// device or the format does not allow it.
    fn many_shape(
        &self,
        format: Format,
        p: &Packing,
        tiles: u32,
        selected: bool,
    ) -> Option<LinearShape> {
        if !(self.known_elements && self.has_room() && format.group != Group::Row) {
            return None;
        }
        let threads = 2 * word(MANY_ROWS);
        let kernel = kernels::LinearMany {
            local: threads,
            tiles,
            code: code_number(format.code),
            width: word(p.width),
            partial: !p.steps.is_multiple_of(p.chunk()),
            selected,
            threads,
            side: side_number(format.code),
        };
        Some(LinearShape::of(&kernel, 8 * tiles as usize, MANY_ROWS))
    }

    /// Returns whether the device allows workgroups as large as the kernels with known elements
    /// need.
    fn has_room(&self) -> bool {
        let i = self.info;
        i.max_workgroup >= THREADS && i.max_subgroups >= THREADS / 32 && i.max_shared >= SHARED
    }
}

/// Adds a linear layer to the calls of the operation, which start at index `begin`. It is merged
/// into a call on the same activations with the same kernel if possible, because few large
/// dispatches are faster than many small ones.
pub(super) fn put_or_merge(calls: &mut Vec<Call>, begin: usize, call: Call) {
    if let Some((args, _)) = call.linear
        && let Some(last) = calls[begin..]
            .last_mut()
            .filter(|l| (l.shader, &l.constants) == (call.shader, &call.constants))
        && let Some((merged, _)) = &mut last.linear
        && merged.merge(&args)
    {
        last.push = Push::of(merged);
        last.groups[1] += call.groups[1];
        last.bytes += call.bytes;
        last.work += call.work;
        last.accesses.extend(call.accesses);
        return;
    }
    calls.push(call);
}

#[cfg(test)]
mod tests {
    use super::PARTS;

    #[test]
    fn rows_have_as_many_parts_as_in_the_shaders() {
        let codes = include_str!("../../../../shaders/include/codes.glsl");
        assert!(codes.contains(&format!("const uint PARTS = {PARTS};")));
    }
}
