//! Kernels other than linear layers.

use super::*;

kernels! {
    Attention, AttentionPush, Attention, [Join];
    PartialAttention, PartialAttentionPush, PartialAttention, [];
    Best, BestPush, Best, [];
    Cap, CapPush, Cap, [];
    Commit, CommitPush, Commit, [];
    Concat, ConcatPush, Concat, [];
    Embed, EmbedPush, Embed, [EmbedTrellis];
    MatrixProbe, MatrixProbePush, MatrixProbe, [];
    Read, ReadPush, Read, [];
    Product, ProductPush, Product, [];
    Repack, RepackPush, Repack, [];
    Rope, RopePush, Rope, [];
    Row, RowPush, Row, [];
    Viterbi, ViterbiPush, Viterbi, [];
}

constants! {
    /// `attention.comp`
    Attention {
        1 SG => subgroup: u32,
        2 HEAD_DIM => head_dim: u32,
        /// Query heads of a kv head.
        3 GQ => group_heads: u32,
        /// Rows of a block.
        4 R => rows: u32,
        5 KV => kv: u32,
        /// Each page has a workgroup of its own, and another one joins the pages.
        6 SPLIT => split: bool,
        /// Workgroups that the query heads of a kv head are split over.
        12 SHARES => shares: u32,
    }
}

constants! {
    /// Epilogue of a block of attention: the join of its pages.
    Join {
        7 JOIN => on: bool,
        8 HADAMARD => hadamard: bool,
        9 INT8 => int8: bool,
        /// Columns that share a scale; 0: all.
        10 GROUP_COLS => group: u32,
        /// Columns of the result.
        11 COLS => cols: u32,
    }
}

arguments! {
    AttentionPush {
        q: u64,
        out: u64,
        k: u64,
        v: u64,
        scratch_k: u64,
        scratch_v: u64,
        step: u64,
        scale: f32,
        n_kv: u32,
        /// Pages of a sequence.
        pages: u32,
        all_pages: u32,
        /// Positions of the window; 0 without one.
        window: u32,
        max_rows: u32,
        /// Most pages of a row that are split.
        slots: u32,
        /// Where the layer's page tables begin among those of the step.
        table: u32,
        /// Address of the arguments of the join.
        epilogue: u64,
    }
}

constants! {
    /// `partial_attention.comp`
    PartialAttention {
        2 HEAD_DIM => head_dim: u32,
        5 KV => kv: u32,
    }
}

arguments! {
    PartialAttentionPush {
        q: u64,
        out: u64,
        k: u64,
        v: u64,
        scratch_k: u64,
        scratch_v: u64,
        step: u64,
        scale: f32,
        n_heads: u32,
        n_kv: u32,
        /// Pages of a sequence.
        pages: u32,
        all_pages: u32,
        max_rows: u32,
        /// See [`gemma_base::kv::OffloadedPages`].
        lag: u32,
        share: u32,
        /// Where the layer's page tables begin among those of the step.
        table: u32,
        _gap: u32,
    }
}

constants! {
    /// `cap.comp`
    Cap {
    }
}

arguments! {
    CapPush {
        logits: u64,
        step: u64,
        vocab: u32,
        cap: f32,
    }
}

constants! {
    /// `best.comp`
    Best {
        1 STAGE => stage: u32,
        /// Entries of a list.
        2 MOST => most: u32,
    }
}

arguments! {
    BestPush {
        logits: u64,
        maxima: u64,
        lists: u64,
        step: u64,
        vocab: u32,
        _gap: u32,
    }
}

constants! {
    /// `commit.comp`
    Commit {
        0 local_size_x => threads: u32,
        1 KV => kv: u32,
    }
}

arguments! {
    CommitPush {
        layers: u64,
        step: u64,
        n_kv: u32,
        head_dim: u32,
        max_rows: u32,
        _gap: u32,
    }
}

constants! {
    /// `concat.comp`
    Concat {
    }
}

arguments! {
    ConcatPush {
        left: u64,
        right: u64,
        out: u64,
        step: u64,
        dim: u32,
        max_rows: u32,
    }
}

constants! {
    /// `embed.comp`
    Embed {
        0 local_size_x => local: u32,
        1 SG => subgroup: u32,
        2 T => threads: u32,
        3 COLS => cols: u32,
        4 CODE => code: u32,
        /// Columns of a step.
        5 W => width: u32,
        6 GROUPED => grouped: bool,
        7 HADAMARD => hadamard: bool,
        27 SIDE => side: u32,
    }
}

constants! {
    /// Constants of a table with trellis codes.
    EmbedTrellis {
        9 STEP => step: u32,
        11 MULTIPLIER => multiplier: u32,
    }
}

arguments! {
    EmbedPush {
        codes: u64,
        side: u64,
        out: u64,
        step: u64,
        factor: f32,
        max_rows: u32,
        /// Rows of the table.
        n: u32,
        _gap: u32,
    }
}

constants! {
    /// `matrix_probe.comp`
    MatrixProbe {}
}

arguments! {
    MatrixProbePush {
        out: u64,
    }
}

constants! {
    /// `read.comp`
    Read {}
}

arguments! {
    ReadPush {
        from: u64,
        sink: u64,
    }
}

constants! {
    /// `repack.comp`
    Repack {
        4 CODE => code: u32,
    }
}

arguments! {
    RepackPush {
        from: u64,
        to: u64,
        /// The high plane.
        high: u64,
        words: u32,
        cols: u32,
        steps: u32,
        step_words: u32,
        high_words: u32,
        _gap: u32,
    }
}

constants! {
    /// `rope.comp`
    Rope {
        0 local_size_x => local: u32,
        1 SG => subgroup: u32,
        2 HEAD_DIM => head_dim: u32,
        3 KV => kv: u32,
        4 V_NORM => v_norm: bool,
    }
}

arguments! {
    RopePush {
        q: u64,
        k: u64,
        v: u64,
        q_norm: u64,
        k_norm: u64,
        table: u64,
        scratch_k: u64,
        scratch_v: u64,
        step: u64,
        eps: f32,
        n_heads: u32,
        n_kv: u32,
        max_rows: u32,
    }
}

constants! {
    /// `row.comp`
    Row {
        0 local_size_x => local: u32,
        1 SG => subgroup: u32,
        2 T => threads: u32,
        3 COLS => cols: u32,
        5 NORM => norm: bool,
        6 SELECTED => selected: bool,
        7 PREPARE => prepare: bool,
        8 HADAMARD => hadamard: bool,
        /// Rounds the activations to int8; otherwise they stay f32.
        9 INT8 => int8: bool,
        /// Columns that share a scale; 0: all.
        10 GROUP => group: u32,
        11 GLU => glu: bool,
        /// Channels of a head whose page partials are joined; 0 without a join.
        12 MERGE => merge: u32,
        /// Several workgroups share a row.
        13 SPREAD => spread: bool,
    }
}

arguments! {
    RowPush {
        x: u64,
        add: u64,
        w_add: u64,
        w: u64,
        z: u64,
        values: u64,
        scales: u64,
        sums: u64,
        step: u64,
        eps: f32,
        /// Bytes from row to row of the prepared values.
        stride: u32,
        max_rows: u32,
        window: u32,
        slots: u32,
        scale: f32,
    }
}

constants! {
    /// `viterbi.comp`
    Viterbi {
        0 T => threads: u32,
        /// Tiles of a workgroup at a time.
        1 N => together: u32,
        /// New bits of a state.
        17 STEP => step: u32,
    }
}

arguments! {
    ViterbiPush {
        targets: u64,
        states: u64,
        costs: u64,
        rows: u64,
        tiles: u32,
        _gap: u32,
    }
}

constants! {
    /// `product.comp`
    Product {
        /// Neighbours in memory are neighbours along the sum.
        0 A_ALONG => a_along: bool,
        1 B_ALONG => b_along: bool,
    }
}

arguments! {
    ProductPush {
        a: u64,
        b: u64,
        c: u64,
        m: u32,
        n: u32,
        k: u32,
        keep: u32,
    }
}
