//! Rewrites syntax of jinja2 for which minijinja has no hook, before parsing.
//!
//! `~`, `%` and `//` become calls of functions that compute as Python does. The tag `generation`,
//! with which transformers marks an assistant's tokens, becomes a scope. Everything else is copied:
//! text, comments, raw blocks, and an unterminated tag, which minijinja rejects.

/// Functions that replace `~`, `%` and `//`. Templates do not know their names.
pub const CONCAT: &str = "__concat";
pub const REMAINDER: &str = "__remainder";
pub const FLOOR: &str = "__floor_division";

/// Most open brackets. minijinja rejects more.
const DEEPEST: usize = 150;

#[derive(Clone, Copy, PartialEq, Eq)]
enum LexemeKind {
    Space,
    Word,
    /// A number or a quoted text.
    Literal,
    Operator,
}

/// A lexeme, or brackets with their content.
enum SyntaxNode<'a> {
    Leaf(LexemeKind, &'a str),
    Group(&'a str, Vec<SyntaxNode<'a>>, &'a str),
}

/// `{{ ... }}` or `{% ... %}`.
struct Tag<'a> {
    open: &'a str,
    nodes: Vec<SyntaxNode<'a>>,
    close: &'a str,
    bytes: usize,
}

/// Returns a template that minijinja renders as jinja2 renders `source`.
pub fn adapted(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = next_tag(rest) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let copied = match rest.starts_with("{#") {
            true => rest[2..].find("#}").map(|end| end + 4),
            false => Tag::read(rest).map(|tag| match tag.word() {
                Some("raw") => raw_block(rest).unwrap_or(rest.len()),
                _ => {
                    tag.write(&mut out);
                    rest = &rest[tag.bytes..];
                    0
                }
            }),
        };
        let (copy, others) = rest.split_at(copied.unwrap_or(rest.len()));
        out.push_str(copy);
        rest = others;
    }
    out + rest
}

/// Returns the position of the next tag or comment.
fn next_tag(text: &str) -> Option<usize> {
    let begins = |at: &usize| matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
    text.match_indices('{').map(|(at, _)| at).find(begins)
}

/// Returns the length in bytes of a raw block, including its tags.
fn raw_block(text: &str) -> Option<usize> {
    let ends = |at: &usize| {
        let inside = text[at + 2..].trim_start_matches(['-', '+']).trim_start();
        let after = inside.strip_prefix("endraw").map(str::trim_start);
        after.is_some_and(|after| after.trim_start_matches(['-', '+']).starts_with("%}"))
    };
    let at = text.match_indices("{%").map(|(at, _)| at).find(ends)?;
    Some(at + text[at..].find("%}")? + 2)
}

impl<'a> Tag<'a> {
    /// Reads the tag at the start of `text`; `None` if it is unterminated.
    fn read(text: &'a str) -> Option<Tag<'a>> {
        let close = if text.starts_with("{{") { "}}" } else { "%}" };
        let begin = 2 + usize::from(text[2..].starts_with(['-', '+']));
        let mut at = begin;
        // Nodes before each open bracket, with the bracket.
        let mut outer: Vec<(&str, Vec<SyntaxNode>)> = Vec::new();
        let mut nodes = Vec::new();
        loop {
            let rest = &text[at..];
            if outer.is_empty() {
                let sign = usize::from(rest.starts_with(['-', '+']));
                if rest[sign..].starts_with(close) {
                    let close = &rest[..sign + 2];
                    let bytes = at + close.len();
                    return Some(Tag { open: &text[..begin], nodes, close, bytes });
                }
            }
            let (kind, width) = token(rest)?;
            let leaf = &rest[..width];
            at += width;
            match leaf {
                "(" | "[" | "{" if outer.len() >= DEEPEST => return None,
                "(" | "[" | "{" => outer.push((leaf, std::mem::take(&mut nodes))),
                ")" | "]" | "}" => {
                    let (open, before) = outer.pop()?;
                    let inside = std::mem::replace(&mut nodes, before);
                    nodes.push(SyntaxNode::Group(open, inside, leaf));
                }
                leaf => nodes.push(SyntaxNode::Leaf(kind, leaf)),
            }
        }
    }

    /// Returns the first word of a statement.
    fn word(&self) -> Option<&'a str> {
        let is_space = |node: &&SyntaxNode| matches!(node, SyntaxNode::Leaf(LexemeKind::Space, _));
        match self.nodes.iter().find(|node| !is_space(node)) {
            Some(SyntaxNode::Leaf(LexemeKind::Word, word)) if self.open.starts_with("{%") => {
                Some(word)
            }
            _ => None,
        }
    }

    fn write(&self, out: &mut String) {
        out.push_str(self.open);
        match self.word() {
            Some("generation") => out.push_str(" with "),
            Some("endgeneration") => out.push_str(" endwith "),
            word => write_nodes(&self.nodes, word.is_some(), out),
        }
        out.push_str(self.close);
    }
}

/// Returns kind and length in bytes of the token at the start of `text`.
fn token(text: &str) -> Option<(LexemeKind, usize)> {
    let first = text.chars().next()?;
    let until =
        |is_part: &dyn Fn(char) -> bool| text.find(|c: char| !is_part(c)).unwrap_or(text.len());
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    Some(match first {
        c if c.is_whitespace() => (LexemeKind::Space, until(&char::is_whitespace)),
        '0'..='9' => (LexemeKind::Literal, number(text)),
        c if is_word(c) => (LexemeKind::Word, until(&is_word)),
        '\'' | '"' => {
            let mut is_escaped = false;
            let ends = |(_, c): &(usize, char)| {
                let ends = *c == first && !is_escaped;
                is_escaped = *c == '\\' && !is_escaped;
                ends
            };
            (LexemeKind::Literal, text.char_indices().skip(1).find(ends)?.0 + 1)
        }
        c => {
            let long = ["==", "!=", "<=", ">=", "**", "//"];
            let is_long = long.iter().any(|operator| text.starts_with(operator));
            (LexemeKind::Operator, if is_long { 2 } else { c.len_utf8() })
        }
    })
}

/// Returns the length in bytes of the number at the start of `text`.
fn number(text: &str) -> usize {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut at = 1;
    while let Some(byte) = bytes.get(at) {
        let goes_on = match byte {
            b'.' => is_digit(at + 1),
            b'+' | b'-' => matches!(bytes[at - 1], b'e' | b'E') && is_digit(at + 1),
            byte => byte.is_ascii_alphanumeric() || *byte == b'_',
        };
        if !goes_on {
            break;
        }
        at += 1;
    }
    at
}

/// Writes nodes of one bracket depth. Operators with lower precedence than `~` separate operands of
/// `~`.
fn write_nodes(nodes: &[SyntaxNode], is_statement: bool, out: &mut String) {
    let mut start = 0;
    for at in 0..nodes.len() {
        if parts(nodes, start, at, is_statement) {
            write_operand(&nodes[start..at], out);
            write_plain(&nodes[at..=at], out);
            start = at + 1;
        }
    }
    write_operand(&nodes[start..], out);
}

/// Returns whether the node has lower precedence than `~`. The current operand began at `start`.
fn parts(nodes: &[SyntaxNode], start: usize, at: usize, is_statement: bool) -> bool {
    let mut before = nodes[..at].iter().enumerate().rev().filter_map(|(i, node)| match node {
        SyntaxNode::Leaf(LexemeKind::Space, _) => None,
        SyntaxNode::Leaf(_, text) => Some((i, *text)),
        SyntaxNode::Group(..) => Some((i, "()")),
    });
    let previous = before.next();
    let is_attribute = previous.is_some_and(|(_, text)| text == ".");
    match nodes[at] {
        SyntaxNode::Leaf(LexemeKind::Operator, "~" | "*" | "/" | "//" | "%" | "**" | "|" | ".") => {
            false
        }
        // A sign before an operand is part of it.
        SyntaxNode::Leaf(LexemeKind::Operator, "+" | "-") => previous.is_some_and(|(i, text)| {
            i >= start && !matches!(text, "~" | "*" | "/" | "//" | "%" | "**")
        }),
        SyntaxNode::Leaf(LexemeKind::Operator, _) => true,
        SyntaxNode::Leaf(LexemeKind::Word, _) if is_attribute => false,
        SyntaxNode::Leaf(LexemeKind::Word, _) if is_statement && previous.is_none() => true,
        SyntaxNode::Leaf(LexemeKind::Word, "and" | "or" | "if" | "else") => true,
        SyntaxNode::Leaf(LexemeKind::Word, "recursive") => is_statement,
        // `is not` and `is in` name a test.
        SyntaxNode::Leaf(LexemeKind::Word, "not" | "in") => match previous {
            Some((_, "is")) => false,
            Some((_, "not")) => before.next().is_none_or(|(_, text)| text != "is"),
            _ => true,
        },
        _ => false,
    }
}

/// Writes an operand of operators with lower precedence than `~`.
fn write_operand(nodes: &[SyntaxNode], out: &mut String) {
    let texts = split(nodes, &["~"]);
    if texts.len() == 1 {
        return write_product(nodes, out);
    }
    out.push_str(&format!(" {CONCAT}("));
    for (i, (_, text)) in texts.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        write_product(text, out);
    }
    out.push_str(") ");
}

/// Writes an operand of `~`: factors, evaluated from the left.
fn write_product(nodes: &[SyntaxNode], out: &mut String) {
    let factors = split(nodes, &["*", "/", "//", "%"]);
    if !factors.iter().any(|(operator, _)| matches!(*operator, "%" | "//")) {
        return write_plain(nodes, out);
    }
    out.push(' ');
    for (operator, _) in factors.iter().skip(1).rev() {
        out.push_str(match *operator {
            "%" => REMAINDER,
            "//" => FLOOR,
            _ => "",
        });
        out.push('(');
    }
    for (i, (operator, factor)) in factors.iter().enumerate() {
        out.push_str(match *operator {
            "%" | "//" => ", ",
            other => other,
        });
        write_plain(factor, out);
        out.push_str(if i > 0 { ")" } else { "" });
    }
    out.push(' ');
}

/// Splits nodes at operators. Each piece is paired with the operator before it.
fn split<'n, 'a>(
    nodes: &'n [SyntaxNode<'a>],
    operators: &[&str],
) -> Vec<(&'a str, &'n [SyntaxNode<'a>])> {
    let (mut pieces, mut start, mut operator) = (Vec::new(), 0, "");
    for (at, node) in nodes.iter().enumerate() {
        if let SyntaxNode::Leaf(LexemeKind::Operator, found) = node
            && operators.contains(found)
        {
            pieces.push((operator, &nodes[start..at]));
            (start, operator) = (at + 1, found);
        }
    }
    pieces.push((operator, &nodes[start..]));
    pieces
}

fn write_plain(nodes: &[SyntaxNode], out: &mut String) {
    for node in nodes {
        match node {
            SyntaxNode::Leaf(_, text) => out.push_str(text),
            SyntaxNode::Group(open, inside, close) => {
                out.push_str(open);
                write_nodes(inside, false, out);
                out.push_str(close);
                // Two braces would end a tag.
                out.push_str(if *close == "}" { " " } else { "" });
            }
        }
    }
}
