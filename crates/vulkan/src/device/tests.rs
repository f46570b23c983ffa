use super::*;

#[test]
fn memory_of_a_gpu_in_the_processor_is_counted_whole() {
    let heap = |bytes, is_local, free| Heap { bytes, is_local, free };
    // RADV reports a third of an APU's memory as not device-local.
    let apu = [heap(6, false, Some(5)), heap(11, true, Some(9))];
    assert_eq!(fast_memory(&apu, true), (17, Some(14)));
    assert_eq!(fast_memory(&apu.map(|h| Heap { free: None, ..h }), true), (17, None));
    // The host-visible window of a discrete GPU's memory is part of the large heap or separate. The
    // host's own heap does not count.
    let board = [heap(24, true, Some(20)), heap(48, false, Some(40)), heap(1, true, Some(1))];
    assert_eq!(fast_memory(&board, false), (24, Some(20)));
    assert_eq!(fast_memory(&[], true), (0, None));
}
