//! Cuts a pass where the executor changes: runs of dispatches, and copies of rows between them.

use crate::compute::operand::{BufferId, RowSet};
use crate::compute::plan::Dispatch;
use crate::compute::uses::Use;
use std::collections::HashMap;

/// One of the two executors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    Device,
    Host,
}

impl Side {
    pub const BOTH: [Side; 2] = [Side::Device, Side::Host];
}

/// One step of a pass that is split over two executors.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    Run(Side, Vec<Dispatch>),
    /// Copies the live rows of this set from the other side to this side.
    Copy(BufferId, RowSet, Side),
}

/// Cuts a list of dispatches, each with its side.
///
/// Before a pass both sides hold the same data, since the caller's writes went to both. A buffer
/// written by one side is copied before the first run of dispatches on the other side that reads
/// it.
pub fn cut(list: Vec<(Side, Dispatch)>) -> Vec<Piece> {
    let mut pieces = Vec::new();
    // Buffers with newer rows on one side than on the other.
    let mut newest: HashMap<BufferId, (Side, RowSet)> = HashMap::new();
    let mut list = list.into_iter().peekable();
    while let Some((side, first)) = list.next() {
        let mut run = vec![first];
        while let Some((_, dispatch)) = list.next_if(|(other, _)| *other == side) {
            run.push(dispatch);
        }
        for dispatch in &mut run {
            let rows = dispatch.rows();
            dispatch.op.uses(&mut |used| {
                let (id, read, written) = match used {
                    Use::Weight(_) => return,
                    Use::Read(id) => (*id, true, false),
                    Use::Write(id) => (*id, false, true),
                    Use::Change(id) => (*id, true, true),
                };
                if let Some((_, rows)) =
                    newest.get(&id).copied().filter(|(at, _)| read && *at != side)
                {
                    pieces.push(Piece::Copy(id, rows, side));
                    newest.remove(&id);
                }
                if written {
                    newest.insert(id, (side, rows));
                }
            });
        }
        pieces.push(Piece::Run(side, run));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::op::{Norm, Op};

    fn norm(x: u32, add: u32, out: u32, rows: RowSet) -> Dispatch {
        let op = Op::Norm(Norm {
            x: BufferId(x),
            add: Some((BufferId(add), BufferId(90))),
            scale: 1.0,
            w: BufferId(91),
            eps: 1e-6,
            dim: 4,
            out: BufferId(out),
            rows,
        });
        Dispatch { op, label: "norm", layer: None }
    }

    #[test]
    fn what_the_other_side_wrote_is_copied_once_and_nothing_else() {
        use RowSet::{All, Selected};
        use Side::{Device, Host};
        let list = vec![
            (Device, norm(0, 1, 2, All)),
            (Host, norm(0, 2, 3, All)),
            (Host, norm(0, 2, 4, Selected)),
            (Device, norm(4, 2, 5, All)),
        ];
        let copies: Vec<Piece> =
            cut(list).into_iter().filter(|p| matches!(p, Piece::Copy(..))).collect();
        // Buffer 0 was changed in place on the device, 2 was written there as a result. The host
        // wrote 4 for selected rows. Buffer 2 is still valid on both sides.
        let want = [(0, All, Host), (2, All, Host), (4, Selected, Device)];
        assert_eq!(copies, want.map(|(id, rows, side)| Piece::Copy(BufferId(id), rows, side)));
    }
}
