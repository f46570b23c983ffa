//! Options of drafts.

use std::str::FromStr;

use gemma_base::error::Fault;

/// `--draft-tree`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TreeSize {
    /// As many nodes as pay.
    #[default]
    Auto,
    /// One line.
    Chain,
    /// Always this many nodes.
    Nodes(usize),
}

impl FromStr for TreeSize {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        match text {
            "auto" => Ok(TreeSize::Auto),
            "chain" => Ok(TreeSize::Chain),
            n => n.parse().ok().filter(|&n| n > 0).map(TreeSize::Nodes).ok_or_else(|| {
                Fault::usage(format!(
                    "a draft tree is `auto`, `chain` or a number of nodes; `{n}` is none of them"
                ))
                .help("--draft off decodes without drafts")
            }),
        }
    }
}

/// The shape of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftOptions {
    pub tree: TreeSize,
    /// `--draft-tokens`: longest line drafted, and with [`TreeSize::Chain`] the only one; `None` as
    /// long as pays.
    pub tokens: Option<usize>,
}

impl DraftOptions {
    /// Returns the number of nodes, where the user has set it.
    pub fn fixed(self) -> Option<usize> {
        match (self.tree, self.tokens) {
            (TreeSize::Nodes(n), _) | (TreeSize::Chain, Some(n)) => Some(n),
            _ => None,
        }
    }
}

/// Whether to draft while the target's device works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ahead {
    /// Where it pays.
    #[default]
    Auto,
    Always,
    Never,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_from_words() {
        assert_eq!("auto".parse::<TreeSize>().unwrap(), TreeSize::Auto);
        assert_eq!("chain".parse::<TreeSize>().unwrap(), TreeSize::Chain);
        assert_eq!("12".parse::<TreeSize>().unwrap(), TreeSize::Nodes(12));
        assert!("0".parse::<TreeSize>().is_err() && "tree".parse::<TreeSize>().is_err());
    }
}
