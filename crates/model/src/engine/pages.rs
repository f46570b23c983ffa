//! Copies single pages between the KV cache and the host.

use super::{PageCopy, PagedLayers, PlannedEngine, Prefix};
use crate::models::forward::{Forward, PageTable};
use anyhow::Result;
use gemma_base::compute::KvLayer;
use gemma_base::kv::{PAGE, PageList};

/// Returns the layers that share a page table.
fn layers<'a>(model: &'a Forward, table: &PageTable) -> impl Iterator<Item = &'a KvLayer> {
    let at = table.at;
    model.kv.iter().filter(move |layer| layer.table == at)
}

/// Returns the layers of each page table.
pub(super) fn paged(model: &Forward) -> Vec<PagedLayers> {
    let of_table = |table: &PageTable| PagedLayers {
        pages: table.pages,
        page_bytes: layers(model, table).map(|layer| PAGE * layer.bytes_per_position()).sum(),
    };
    model.tables.iter().map(of_table).collect()
}

impl PlannedEngine {
    /// See [`Engine::copy_page`](super::Engine::copy_page).
    pub(super) fn copy_one_page(
        &mut self,
        prefix: &mut Prefix,
        table: usize,
        nth: usize,
        copy: PageCopy<'_>,
    ) -> Result<bool> {
        let PagedLayers { pages, page_bytes } = self.info.paged[table];
        if prefix.pages.is_empty() {
            prefix.pages = vec![PageList::default(); self.pools.len()];
        }
        let list = &mut prefix.pages[table];
        let page = match copy {
            PageCopy::Out(_) => list.page(nth),
            PageCopy::In(bytes) if bytes.len() != page_bytes => None,
            PageCopy::In(_) => list.append(nth, pages, &self.pools[table]),
        };
        let Some(page) = page else { return Ok(false) };
        let layers = layers(&self.model, &self.model.tables[table]);
        let mut parts = layers.flat_map(|layer| layer.page_parts(page as usize));
        match copy {
            PageCopy::Out(bytes) => parts.try_for_each(|(buffer, at, size)| {
                let start = bytes.len();
                bytes.resize(start + size, 0);
                self.exec.read(buffer, at, &mut bytes[start..])
            })?,
            PageCopy::In(mut bytes) => parts.try_for_each(|(buffer, at, size)| {
                let (part, rest) = bytes.split_at(size);
                bytes = rest;
                self.exec.write(buffer, at, part)
            })?,
        }
        Ok(true)
    }
}
