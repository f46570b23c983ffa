//! Draft models with fewer tokens than the target.

use gemma::engine::{EngineExt, Input, Output};

use super::*;

/// Returns a draft with rows for some of the target's tokens.
fn reduced_draft(seed: u64) -> (Toy, Box<dyn Engine>) {
    let toy = Toy { vocab: reduced::tokens().len(), order: 3, max_rows: 64, ..Toy::new(seed) };
    (toy.clone(), Box::new(VocabAdapter::new(toy.engine(), reduced::spelling()).unwrap()))
}

#[test]
fn a_vocabulary_fits_the_tokenizer_it_was_made_for_and_spells_the_rest() {
    let tokenizer = reduced::tokenizer(false);
    let vocabulary = reduced::vocabulary(&tokenizer);
    assert_eq!(vocabulary.mismatch(&tokenizer), None);
    assert!(vocabulary.mismatch(&reduced::tokenizer(true)).unwrap().contains("pieces differ"));
    let spelling = vocabulary.spelling(&tokenizer);
    let rows = |token: u32| {
        let mut rows = Vec::new();
        spelling.spell(token, &mut rows);
        rows
    };
    let mut spelled = 0;
    for token in 0..tokenizer.vocab() as u32 {
        let (rows, text) = (rows(token), tokenizer.token_bytes(token));
        let back: Vec<u8> =
            rows.iter().flat_map(|r| tokenizer.token_bytes(spelling.token(*r))).collect();
        match spelling.row(token) {
            Some(row) => assert_eq!((rows.as_slice(), spelling.token(row)), (&[row][..], token)),
            // At most two rows: the end of a longer text.
            None => {
                spelled += 1;
                assert!(
                    (1..=2).contains(&rows.len()) && text.ends_with(&back) && !back.is_empty(),
                    "{token} {rows:?}"
                );
            }
        }
    }
    assert!(spelled > 20, "{spelled}");
    // An id that is not a token becomes the unknown token.
    assert_eq!(rows(100_000), [3]);

    for (change, words) in [
        (r#"{"steps": [0, 1]}"#, "missing field"),
        ("[]", "not the vocabulary of a draft model"),
        (
            r#"{"tokenizer": {"first": 9, "end": 9, "sha256": "", "control": {}},
                "parts": 2, "steps": [0]}"#,
            "out of range",
        ),
        (
            r#"{"tokenizer": {"first": 1, "end": 9, "sha256": "", "control": {}},
                "parts": 99, "steps": [0]}"#,
            "out of range",
        ),
        (
            r#"{"tokenizer": {"first": 1, "end": 9, "sha256": "", "control": {}},
                "parts": 2, "steps": [4, 0]}"#,
            "row 1",
        ),
        (
            r#"{"tokenizer": {"first": 1, "end": 9, "sha256": "", "control": {}},
                "parts": 2, "steps": [4294967295]}"#,
            "row 0",
        ),
        (
            r#"{"tokenizer": {"first": 1, "end": 9, "sha256": "", "control": {}},
                "parts": 2, "steps": [4, 1]}"#,
            "2 tokens are listed for 1 rows",
        ),
    ] {
        let error = format!("{:#}", ReducedVocabulary::parse(change.as_bytes(), 1).unwrap_err());
        assert!(error.contains(words), "{change}: {error}");
    }
}

/// As a target it scores every token. Tokens with a row keep their scores, and the others get
/// scores that no sampler picks.
#[test]
fn a_reduced_engine_stands_in_for_a_target() {
    let (toy, mut narrow) = reduced_draft(5);
    let spelling = reduced::spelling();
    let mut whole = VocabAdapter::new(toy.engine(), reduced::spelling()).unwrap().whole();
    assert!(whole.info().columns.is_none() && narrow.info().columns.is_some());
    let mut tree = TokenTree::root(300);
    [(0, 301), (1, 2), (0, 310)]
        .into_iter()
        .for_each(|(parent, token)| _ = tree.push(parent, token));
    let (mut some, mut all) = (Scores::default(), Scores::default());
    narrow.forward(&tree, Rows::All, &mut some).unwrap();
    whole.forward(&tree, Rows::All, &mut all).unwrap();
    assert_eq!((all.vocab, all.rows()), (spelling.vocab(), 4));
    for row in 0..4 {
        let wide = all.row(row);
        assert_eq!(wide.iter().filter(|l| l.is_finite()).count(), spelling.rows());
        assert!(
            some.row(row)
                .iter()
                .enumerate()
                .all(|(at, logit)| wide[spelling.token(at as u32) as usize] == *logit)
        );
        let config = SamplerConfig { temperature: 1.0, seed: row as u64, ..Default::default() };
        let picked = Sampler::new(config).unwrap().pick(row, wide, &[]).unwrap();
        assert!(spelling.row(picked).is_some());
    }
}

#[test]
fn a_reduced_engine_computes_what_its_rows_do() {
    let (toy, mut engine) = reduced_draft(5);
    let spelling = reduced::spelling();
    let (mut inner, mut want, mut got) = (toy.engine(), Scores::default(), Scores::default());
    let rows_of = |tokens: &[u32]| {
        let mut rows = Vec::new();
        tokens.iter().for_each(|t| spelling.spell(*t, &mut rows));
        rows
    };
    let history: Vec<u32> = (0..12).map(|i| 2 + i * 29 % 318).collect();
    assert!(rows_of(&history).len() > history.len() && engine.info().max_rows == 64);
    // Two passes read the history. Then come one token and a tree below it.
    for part in history.chunks(7) {
        engine.forward(&TokenTree::chain(part), Rows::None, &mut got).unwrap();
        engine.commit(&[(0, &(0..part.len() as u32).collect::<Vec<_>>())]).unwrap();
    }
    assert_eq!(engine.position(0), 12);
    let rows = rows_of(&history);
    inner.forward(&TokenTree::chain(&rows), Rows::None, &mut want).unwrap();
    inner.commit(&[(0, &(0..rows.len() as u32).collect::<Vec<_>>())]).unwrap();
    let mut tree = TokenTree::root(300);
    for (parent, token) in [(0, 301), (0, 302), (1, 303), (3, 2), (2, 310)] {
        tree.push(parent, token);
    }
    let mut logits_of = |path: &[u32]| {
        let rows = rows_of(path);
        inner.forward(&TokenTree::chain(&rows), Rows::Last, &mut want).unwrap();
        want.row(0).to_vec()
    };
    let first = TokenTree { tokens: tree.tokens[..3].to_vec(), parent: tree.parent[..3].to_vec() };
    for node in [0, 1, 2] {
        engine.forward(&first, Rows::All, &mut got).unwrap();
        let path = [&[300][..], &tree.path(node)].concat();
        assert_eq!((got.rows(), got.row(node as usize)), (3, &logits_of(&path)[..]), "node {node}");
    }
    engine.run(&[Input::new(0, &tree, Rows::All).after(3)], Output::Logits, &mut got).unwrap();
    for node in [3, 4, 5] {
        let path = [&[300][..], &tree.path(node)].concat();
        assert_eq!(
            (got.rows(), got.row(node as usize - 3)),
            (3, &logits_of(&path)[..]),
            "node {node}"
        );
    }
    engine.commit(&[(0, &[0, 1, 3])]).unwrap();
    assert_eq!(engine.position(0), 15);
    engine.forward(&TokenTree::root(5), Rows::Last, &mut got).unwrap();
    assert_eq!(got.row(0), logits_of(&[300, 301, 303, 5]));
    engine.truncate(0, 13).unwrap();
    engine.forward(&TokenTree::root(7), Rows::Last, &mut got).unwrap();
    assert_eq!(got.row(0), logits_of(&[300, 7]));
    assert!(
        engine.forward(&TokenTree::root(320), Rows::Last, &mut got).is_err()
            && engine.truncate(0, 14).is_err()
    );
    let columns = engine.info().columns.clone().unwrap();
    for (column, token) in reduced::tokens().into_iter().enumerate() {
        assert_eq!((columns.token(column), columns.column(token)), (token, Some(column)));
    }
    assert_eq!(columns.column(268), None);
}

#[test]
fn a_draft_of_few_rows_gives_the_plain_text_and_proposes_what_it_knows() {
    let known = reduced::tokens();
    for (i, config) in settings().into_iter().enumerate() {
        let target = Toy { vocab: reduced::END, ..Toy::new(i as u64) };
        let case =
            Case::new(&[2, 264, 301, 302, 268, 9], SamplerConfig { seed: 7 + i as u64, ..config });
        let (text, figures) = check(&|| target.engine(), &|| reduced_draft(8).1, &case);
        assert!(
            text.heard.iter().any(|t| !known.contains(t)),
            "some of the text is outside the vocabulary"
        );
        let drafted = figures.iter().find(|(name, _)| *name == "model").unwrap().1.total.drafted;
        assert!(drafted > 100, "{drafted}");
    }
    let sampler = Sampler::new(SamplerConfig::default()).unwrap();
    let mut drafter = TreeBuilder::of_model(reduced_draft(8).1);
    let mut out = Proposal::default();
    let history = [2, 268, 301];
    out.reset(301);
    let ctx = DraftContext {
        history: &history,
        sampler: &sampler,
        nodes: 31,
        depth: 8,
        vocab: reduced::END,
        chain: false,
        draft_steps: usize::MAX,
        rate: None,
        verified: None,
    };
    drafter.propose(&mut [DraftRequest { text: 0, ctx, out: &mut out }], None).unwrap();
    assert!(
        out.len() > 8 && out.tree.tokens[1..].iter().all(|t| known.contains(t)),
        "{:?}",
        out.tree.tokens
    );
}
