//! Parser of xclbin files ("axlf"), the container of a built array.
//!
//! Only one section is used, AIE_PARTITION. It has the number of columns and the image (PDI) that
//! configures them. The layout is that of XRT's `xrt/detail/xclbin.h`. Files are untrusted, so
//! every offset is checked.

use anyhow::{Context, Result, ensure};

const MAGIC: &[u8; 8] = b"xclbin2\0";
/// Offsets of the file's length, of the section count and of the section headers.
const LENGTH_AT: usize = 304;
const SECTIONS_AT: usize = 448;
const HEADERS_AT: usize = 456;
const HEADER: usize = 40;
const MAX_SECTIONS: u32 = 0x1_0000;
const AIE_PARTITION: u32 = 32;
/// Sizes of the structures in the section.
const PARTITION: usize = 184;
const PDI: usize = 96;
const GROUP: usize = 96;
/// Kind of the group that runs instruction streams.
const PRIMARY: u8 = 1;
/// Limit for the size of an image: 32 KiB for each of 64 x 64 tiles.
const MAX_IMAGE: usize = 32 * 1024 * 64 * 64;

/// The parts of an xclbin file that the loader needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition<'a> {
    pub columns: usize,
    pub image: &'a [u8],
    pub kernel_id: u64,
}

/// Returns `N` bytes at `at`.
fn bytes<const N: usize>(data: &[u8], at: usize) -> Result<[u8; N]> {
    let part = at.checked_add(N).and_then(|end| data.get(at..end));
    Ok(part.with_context(|| format!("ends before byte {at} + {N}"))?.try_into().expect("N bytes"))
}

fn u16_at(data: &[u8], at: usize) -> Result<u16> {
    bytes(data, at).map(u16::from_le_bytes)
}

fn u32_at(data: &[u8], at: usize) -> Result<u32> {
    bytes(data, at).map(u32::from_le_bytes)
}

fn u64_at(data: &[u8], at: usize) -> Result<u64> {
    bytes(data, at).map(u64::from_le_bytes)
}

/// Returns the elements of an array. The section has its count and offset at byte `at`.
fn array<'a>(section: &'a [u8], at: usize, size: usize, what: &str) -> Result<&'a [u8]> {
    let (count, offset) = (u32_at(section, at)? as usize, u32_at(section, at + 4)? as usize);
    let end = count.checked_mul(size).and_then(|n| n.checked_add(offset));
    let found = end.and_then(|end| section.get(offset..end));
    found.with_context(|| {
        format!(
            "{what}: {count} of {size} bytes at {offset} do not fit in a section of {}",
            section.len()
        )
    })
}

/// Parses the partition of a whole file.
pub fn parse(file: &[u8]) -> Result<Partition<'_>> {
    ensure!(file.starts_with(MAGIC), "not an xclbin file");
    let length = u64_at(file, LENGTH_AT)?;
    ensure!(
        length == file.len() as u64,
        "the header says {length} bytes, the file has {}",
        file.len()
    );
    let sections = u32_at(file, SECTIONS_AT)?;
    ensure!(sections <= MAX_SECTIONS, "{sections} sections");
    let mut found = None;
    for i in 0..sections as usize {
        let header = HEADERS_AT + i * HEADER;
        if u32_at(file, header)? == AIE_PARTITION {
            ensure!(found.is_none(), "two AIE partitions");
            let (offset, size) = (u64_at(file, header + 24)?, u64_at(file, header + 32)?);
            let end = offset.checked_add(size).filter(|end| *end <= file.len() as u64);
            let end = end.with_context(|| {
                format!("section {i} of {size} bytes at {offset} does not fit in the file")
            })?;
            found = Some(&file[offset as usize..end as usize]);
        }
    }
    partition(found.context("has no AIE partition")?)
}

fn partition(section: &[u8]) -> Result<Partition<'_>> {
    ensure!(section.len() >= PARTITION, "a partition of {} bytes", section.len());
    let columns = u16_at(section, 32)? as usize;
    ensure!((1..=super::txn::MAX_COLUMNS).contains(&columns), "a partition of {columns} columns");
    let pdis = array(section, 120, PDI, "images")?;
    ensure!(pdis.len() == PDI, "{} images, expected one", pdis.len() / PDI);
    let image = array(section, section_offset(section, pdis) + 16, 1, "image")?;
    ensure!(!image.is_empty() && image.len() <= MAX_IMAGE, "an image of {} bytes", image.len());
    let groups = array(section, section_offset(section, pdis) + 24, GROUP, "groups")?;
    for group in groups.chunks_exact(GROUP) {
        if group[4] == PRIMARY {
            let ids = array(section, section_offset(section, group) + 16, 8, "kernel ids")?;
            return Ok(Partition {
                columns,
                image,
                kernel_id: u64_at(ids, 0).context("a group without kernels")?,
            });
        }
    }
    anyhow::bail!("no group of the image runs instructions")
}

/// Returns the offset of `part` in the section.
fn section_offset(section: &[u8], part: &[u8]) -> usize {
    part.as_ptr() as usize - section.as_ptr() as usize
}

/// Builds a file that has only this partition, for the host model and for tests.
pub fn build(p: &Partition<'_>) -> Vec<u8> {
    let (pdi_at, group_at, ids_at, image_at) =
        (PARTITION, PARTITION + PDI, PARTITION + PDI + GROUP, PARTITION + PDI + GROUP + 8);
    let mut section = vec![0; image_at];
    let mut put = |at: usize, bytes: &[u8]| section[at..at + bytes.len()].copy_from_slice(bytes);
    let pair = |count: usize, offset: usize| {
        [(count as u32).to_le_bytes(), (offset as u32).to_le_bytes()].concat()
    };
    put(32, &(p.columns as u16).to_le_bytes());
    put(120, &pair(1, pdi_at));
    put(pdi_at + 16, &pair(p.image.len(), image_at));
    put(pdi_at + 24, &pair(1, group_at));
    put(group_at + 4, &[PRIMARY]);
    put(group_at + 16, &pair(1, ids_at));
    put(ids_at, &p.kernel_id.to_le_bytes());
    section.extend(p.image);
    let data_at = (HEADERS_AT + HEADER).next_multiple_of(8);
    let mut file = vec![0; data_at];
    file[..8].copy_from_slice(MAGIC);
    file[LENGTH_AT..][..8].copy_from_slice(&((data_at + section.len()) as u64).to_le_bytes());
    file[SECTIONS_AT..][..4].copy_from_slice(&1u32.to_le_bytes());
    file[HEADERS_AT..][..4].copy_from_slice(&AIE_PARTITION.to_le_bytes());
    file[HEADERS_AT + 24..][..8].copy_from_slice(&(data_at as u64).to_le_bytes());
    file[HEADERS_AT + 32..][..8].copy_from_slice(&(section.len() as u64).to_le_bytes());
    file.extend(section);
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Partition<'static> {
        Partition { columns: 4, image: b"an image of the array", kernel_id: 0x901 }
    }

    #[test]
    fn what_was_built_is_read() {
        for columns in [1, 4] {
            let p = Partition { columns, ..sample() };
            assert_eq!(parse(&build(&p)).unwrap(), p);
        }
    }

    #[test]
    fn a_file_cut_anywhere_or_changed_anywhere_is_an_error_or_the_same() {
        let file = build(&sample());
        for length in 0..file.len() {
            assert!(parse(&file[..length]).is_err(), "{length} bytes");
        }
        for at in 0..file.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bad = file.clone();
                bad[at] = value;
                if let Ok(p) = parse(&bad) {
                    assert!(p.columns <= 4 && p.image.len() <= file.len());
                }
            }
        }
        for columns in [0, 5] {
            assert!(parse(&build(&Partition { columns, ..sample() })).is_err());
        }
        assert!(parse(&build(&Partition { image: &[], ..sample() })).is_err());
    }
}
