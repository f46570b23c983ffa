//! Poisoned outputs and scratch memory: a skipped workgroup is found even if memory still holds the
//! right result of an earlier step.

use crate::common;
use assert_cmd::Command;
use common::twins::{HEADS, Step, Twins, format, layer};
use common::vulkan::device;
use gemma::compute::{
    Attention, Commit, Embed, GateUp, Linear, Norm, Op, PageRange, Prepare, Rope, RopeKeys, RowSet,
};
use gemma::testing::CUT_WORK;
use gemma::vulkan::ALLOW_CPU_DRIVER;

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_workgroup_that_is_left_out_is_found() {
    let Some(open) = device() else { return };
    // Runs twice, then without the last workgroups of each call.
    let must_find = |what: &str, make: &dyn Fn(&mut Twins) -> Op| {
        let mut t = Twins::new(open(), 21);
        let op = make(&mut t);
        let step = Step { live: 8, base: 300, path: 4, ..Step::default() };
        let plan = t.record(vec![op]);
        for _ in 0..2 {
            t.try_run(plan, step).unwrap_or_else(|e| panic!("{what}: {e:#}"));
        }
        t.exec.device().cut_work(Some("op"));
        assert!(t.try_run(plan, step).is_err(), "{what}: nothing was found");
    };
    let rows = RowSet::All;
    for weights in ["i4-g32", "t2-row", "bf16"] {
        must_find(weights, &|t| {
            Op::Linear(Linear { jobs: vec![t.job(format(weights), 40, 64)], rows })
        });
    }
    must_find("embed", &|t| {
        let (table, out) = (t.matrix(format("i8-row"), 37, 48), t.rows(48));
        Op::Embed(Embed { table, scale: 2.0, out })
    });
    must_find("norm", &|t| {
        let (x, w, out) = (t.floats(640), t.vector(640), t.rows(640));
        Op::Norm(Norm { x, add: None, scale: 1.0, w, eps: 1e-6, dim: 640, out, rows })
    });
    must_find("prepare", &|t| {
        let (input, act) = (t.floats(256), t.act(format("i4-g32+h128"), 256));
        Op::Prepare(Prepare { input, act, rows })
    });
    must_find("gate and up", &|t| {
        let [gate, up] = [0; 2].map(|_| t.job(format("i8-row"), 40, 64));
        let (act_gate, act_up, out) = (gate.act, up.act, gate.out);
        Op::GateUp(GateUp { act_gate, gate: gate.weight, act_up, up: up.weight, out })
    });
    let heads = HEADS[0].0;
    let (dim, n_heads, n_kv, ..) = heads;
    must_find("rotation", &|t| {
        let [q, k, v] = [n_heads, n_kv, n_kv].map(|n| t.floats(n * dim));
        let (q_norm, k_norm, rope_table) = (t.vector(dim), t.vector(dim), t.floats(dim));
        let keys = Some(RopeKeys { k, v, k_norm, v_norm: false });
        let kv = layer(t, heads);
        Op::Rope(Rope { q, q_norm, keys, eps: 1e-6, n_heads, rope_table, kv })
    });
    must_find("attention", &|t| {
        let (q, out, kv) = (t.floats(n_heads * dim), t.rows(n_heads * dim), layer(t, heads));
        Op::Attention(Attention {
            q,
            out,
            n_heads,
            scale: 0.25,
            kv,
            whole_images: false,
            range: PageRange::All,
        })
    });
    must_find("commit", &|t| Op::Commit(Commit { layers: vec![layer(t, heads), layer(t, heads)] }));
}

/// A kernel that skips work is fast and wrong. `bench --poison` reports it.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_bench_of_half_a_kernel_fails_if_it_is_poisoned() {
    if device().is_none() {
        return;
    }
    let bench = |more: &[&str]| {
        let mut command = Command::cargo_bin("gemma").unwrap();
        command.args(["bench", "--only", "verify", "--rows", "1,3", "-p", "9", "-r", "1"]);
        command.args(["-d", "vulkan"]).args(more).env(ALLOW_CPU_DRIVER, "1");
        command
    };
    let verdict = "poison: passes over 1, 3, 9 rows give the same bits";
    bench(&["--poison"]).assert().success().stderr(predicates::str::contains(verdict));
    bench(&[]).env(CUT_WORK, "gate_up").assert().success();
    let found = "a kernel does not compute all elements: a pass over 1 row gives other scores";
    let failed = bench(&["--poison"]).env(CUT_WORK, "gate_up").assert().code(1);
    failed.stderr(predicates::str::contains(found));
}
