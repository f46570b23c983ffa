//! Draft options of the command line.

use std::str::FromStr;

use gemma_base::error::Fault;

/// `--draft-tree`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TreeSize {
    /// As many nodes as the policy considers worthwhile.
    #[default]
    Auto,
    /// A chain without branches.
    Chain,
    /// Always this number of nodes.
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

/// Limits of the draft tree's shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftOptions {
    pub tree: TreeSize,
    /// `--draft-tokens`: the most depth of a tree, and with [`TreeSize::Chain`] the exact length;
    /// `None` lets the policy decide.
    pub tokens: Option<usize>,
}

impl DraftOptions {
    /// Returns the number of nodes, if the user fixed it.
    pub fn fixed(self) -> Option<usize> {
        match (self.tree, self.tokens) {
            (TreeSize::Nodes(n), _) | (TreeSize::Chain, Some(n)) => Some(n),
            _ => None,
        }
    }
}

/// Whether to draft while the target's device runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ahead {
    /// If it is faster.
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
