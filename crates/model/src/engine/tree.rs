//! The draft tree. Node 0 is the newest committed token; a chain is the special case.

use gemma_base::tensor::Token;

/// Tokens to score in one pass. Parents come before their children.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenTree {
    pub tokens: Vec<Token>,
    /// `None` only for node 0.
    pub parent: Vec<Option<u32>>,
}

impl TokenTree {
    /// Creates a tree with only a root.
    pub fn root(token: Token) -> Self {
        TokenTree { tokens: vec![token], parent: vec![None] }
    }

    /// Creates a chain of tokens, the first as the root.
    pub fn chain(tokens: &[Token]) -> Self {
        let parent = (0..tokens.len() as u32).map(|i| i.checked_sub(1)).collect();
        TokenTree { tokens: tokens.to_vec(), parent }
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Removes all nodes.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.parent.clear();
    }

    /// Adds a child and returns its index.
    pub fn push(&mut self, parent: u32, token: Token) -> u32 {
        assert!((parent as usize) < self.len(), "a parent comes before its child");
        self.tokens.push(token);
        self.parent.push(Some(parent));
        self.len() as u32 - 1
    }

    /// Returns the child of `parent` with this token.
    pub fn child(&self, parent: u32, token: Token) -> Option<u32> {
        (parent as usize + 1..self.len())
            .find(|&i| self.parent[i] == Some(parent) && self.tokens[i] == token)
            .map(|i| i as u32)
    }

    /// Returns the nodes of the longest prefix of `tokens` in the tree, root first; empty if the
    /// root is another token.
    pub fn walk(&self, tokens: &[Token]) -> Vec<u32> {
        let mut path: Vec<u32> = Vec::new();
        for &token in tokens {
            let next = match path.last() {
                Some(&node) => self.child(node, token),
                None => (self.tokens.first() == Some(&token)).then_some(0),
            };
            match next {
                Some(node) => path.push(node),
                None => break,
            }
        }
        path
    }

    /// Adds a child unless it exists; returns its index.
    pub fn insert(&mut self, parent: u32, token: Token) -> u32 {
        self.child(parent, token).unwrap_or_else(|| self.push(parent, token))
    }

    /// Returns the distance of each node from the root.
    pub fn depths(&self) -> Vec<u32> {
        let mut depths: Vec<u32> = Vec::with_capacity(self.len());
        for parent in &self.parent {
            depths.push(parent.map_or(0, |p| depths[p as usize] + 1));
        }
        depths
    }

    /// Returns the tokens from the root (exclusive) to `node` (inclusive).
    pub fn path(&self, node: u32) -> Vec<Token> {
        let mut path = Vec::new();
        let mut at = node as usize;
        while let Some(parent) = self.parent[at] {
            path.push(self.tokens[at]);
            at = parent as usize;
        }
        path.reverse();
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_knows_its_paths() {
        let mut tree = TokenTree::root(7);
        let a = tree.push(0, 1);
        let b = tree.push(a, 2);
        let c = tree.insert(0, 3);
        assert_eq!(tree.insert(0, 1), a);
        assert_eq!(tree.path(b), [1, 2]);
        assert_eq!(tree.path(0), [0; 0]);
        assert_eq!(tree.depths(), [0, 1, 2, 1]);
        assert_eq!(tree.child(0, 3), Some(c));
        assert_eq!(tree.child(a, 3), None);
        assert_eq!(tree.walk(&[7, 1, 2, 9]), [0, a, b]);
        assert_eq!(tree.walk(&[7]), [0]);
        assert_eq!(tree.walk(&[1, 2]), [0; 0]);
    }
}
