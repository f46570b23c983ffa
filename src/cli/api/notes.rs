//! Notes about the requests of clients.

use crate::cli::io::ui::clean;
use std::collections::HashSet;
use std::sync::Mutex;

/// Limits: notes that are logged, and characters of one note.
const MOST_NOTES: usize = 200;
const LONGEST_NOTE: usize = 200;

/// Notes to the operator about the requests of clients. Each note is logged once.
pub struct Notes {
    tell: Box<dyn Fn(&str) + Send + Sync>,
    told: Mutex<HashSet<String>>,
}

impl Notes {
    /// Makes notes that are passed to `tell`.
    pub fn new(tell: impl Fn(&str) + Send + Sync + 'static) -> Notes {
        Notes { tell: Box::new(tell), told: Mutex::default() }
    }

    pub fn once(&self, text: String) {
        let text = clean(&text.chars().take(LONGEST_NOTE).collect::<String>());
        let mut told = self.told.lock().unwrap_or_else(|e| e.into_inner());
        if told.len() < MOST_NOTES && told.insert(text.clone()) {
            (self.tell)(&text);
        }
    }
}
