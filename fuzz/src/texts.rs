//! Texts in formal languages: tokenizers, templates, grammars, settings and recipes.

use super::confined::confined;
use super::made_up::{Cursor, edited, raw_or, text_of};
use super::{DIRECTORY, file};
use gemma::cli::commands;
use gemma::grammar::{self, GrammarSource, Grammars, parse_schema};
use gemma::models::{ChatTemplate, Message, Special, Tokenizer, chat};
use gemma::quant::Recipe;
use gemma::sampler::TokenRule;
use gemma::tensor::Token;
use serde_json::{Map, Value, json};
use std::sync::{Arc, LazyLock};

/// A tokenizer file with tokens for all bytes and for ASCII characters. With a small vocabulary,
/// grammars are fast.
static TOKENIZER_FILE: LazyLock<Value> = LazyLock::new(|| {
    let control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"];
    let mut pieces: Vec<String> = control.map(String::from).to_vec();
    pieces.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    pieces.extend("▁\n".chars().chain('!'..='~').map(String::from));
    let merges = [["▁", "a"], ["\"", ":"], ["t", "r"], ["tr", "u"], ["tru", "e"], ["{", "\""]];
    pieces.extend(merges.map(|pair| pair.concat()));
    let vocabulary: Map<String, Value> =
        pieces.into_iter().enumerate().map(|(id, piece)| (piece, id.into())).collect();
    let added = control.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
    });
    json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
            "behavior": "MergedWithPrevious", "invert": false},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": true,
            "fuse_unk": true, "unk_token": "<unk>"},
    })
});

pub static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let bytes = TOKENIZER_FILE.to_string();
    Arc::new(Tokenizer::from_bytes(bytes.as_bytes()).expect("it is good"))
});

/// A tokenizer file that is small enough for many edits.
static SMALL_FILE: LazyLock<Value> = LazyLock::new(|| {
    let mut file = TOKENIZER_FILE.clone();
    let pieces = ["<bos>", "a", "b", "ab", "▁", "<0x0A>", "<0xF0>", "▁ab"];
    let ids = pieces.iter().enumerate().map(|(id, piece)| (piece.to_string(), id.into()));
    file["model"]["vocab"] = Value::Object(ids.collect());
    file["model"]["merges"] = json!([["a", "b"], ["▁", "ab"]]);
    file["model"]["unk_token"] = json!("<bos>");
    file["added_tokens"] = json!([file["added_tokens"][2]]);
    file["added_tokens"][0]["id"] = json!(0);
    file
});

pub fn tokenizer(data: &[u8]) {
    const KEYS: &str = r#"
        type pattern Regex String content post_processor vocab merges ignore_merges dropout
        continuing_subword_prefix truncation"#;
    let bytes = raw_or(data, |cursor| edited(cursor, &SMALL_FILE, KEYS));
    let Ok(tokenizer) = Tokenizer::from_bytes(&bytes) else { return };
    for special in [Special::AsText, Special::Parse] {
        if let Ok(tokens) = tokenizer.encode("ab <bos> \u{1f600}\nba  <b", special) {
            let _ = tokenizer.decode(&tokens);
        }
    }
    let messages = [Message::new("user", "a <bos> b")];
    let _ = ChatTemplate::built_in(tokenizer.dialect()).encode(
        &tokenizer,
        &messages,
        None,
        Special::AsText,
        None,
    );
}

/// Renders a template under the limits of the program's child.
pub fn template(data: &[u8]) {
    const WORDS: &str = r#"
        {{· ·}} {%· ·%} {%-· ·-%} {#· ·#} if· elif· else endif for·m·in·messages endfor set·x·=·
        endset macro·f(a,·b=1) endmacro call(y)·f(1) endcall filter·upper endfilter block·b
        endblock include·'x' import·'x'·as·y break continue do·f(x) with·a·=·1 endwith raw endraw
        messages m .role .content ['content'] [0] [1:] [::-1] loop.index0 loop.last loop.first
        loop.previtem loop.cycle('a',·'b') loop(m) bos_token eos_token add_generation_prompt
        enable_thinking tools namespace(a='') x x.a f(x) range(9) range(999999999) dict(a=1)
        raise_exception('no') true none 0 1 -1 9223372036854775807 1.5 1e308 'a' ''
        '<end_of_turn>\n' [ ] ( ) {'a':·1} ,· :· ·+· ·-· ·*· ·/· ·//· ·%· ·**· ·~· ·==· ·!=· ·<·
        ·in· ·not·in· ·not· ·and· ·or· ·is·defined ·is·string ·is·mapping ·is·divisibleby·0 ·if·
        ·else· ·|·trim ·|·upper ·|·length ·|·tojson ·|·tojson(indent=4) ·|·replace('a',·'bb')
        ·|·join('x') ·|·list ·|·sort ·|·sort(attribute='role') ·|·groupby('role') ·|·unique
        ·|·map('upper') ·|·select('string') ·|·rejectattr('role') ·|·batch(3) ·|·slice(3)
        ·|·first ·|·last ·|·items ·|·dictsort ·|·indent(4) ·|·default('a') ·|·int ·|·float
        ·|·round(2) ·|·abs ·|·sum ·|·min ·|·reverse ·|·safe ·|·escape ·|·string ·|·format('a')
        .strip() .split('a') .replace('a',·'b') .items() .get('a',·1) .startswith('a') .format(1)
        .join(x) .center(9) .title()"#;
    let bytes = raw_or(data, |cursor| text_of(cursor, WORDS).into_bytes());
    let Ok(text) = std::str::from_utf8(&bytes) else { return };
    let message = |role: &str, content: &str| Message::new(role, content);
    let messages = [message("user", "a <end_of_turn>"), message("assistant", "b\n")];
    let template = ChatTemplate::of(text.into());
    confined(chat::LIMITS, chat::TIME, || {
        let _ = template.render(&messages, true);
    });
}

/// Compiles a grammar and generates the start of a text that follows it, under the limits of the
/// program's child. The first byte selects the notation and the way to generate.
pub fn grammar(data: &[u8]) {
    /// Limit of the text in tokens.
    const LONGEST: usize = 6;
    static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| {
        Grammars::new(TOKENIZER.clone(), &[1], 1).expect("the tokenizer has an end")
    });
    let Some((how, rest)) = data.split_first() else { return };
    let (choices, rest) = rest.split_at(LONGEST.min(rest.len()));
    let make = [schema, lark, regex][usize::from(how % 3)];
    let bytes = match how / 3 % 2 {
        0 => make(&mut Cursor::new(rest)),
        _ => rest.to_vec(),
    };
    let Ok(text) = String::from_utf8(bytes) else { return };
    let source = match how % 3 {
        // The parent process parses schemas, without limits of time and memory.
        0 => match parse_schema(&text, "a schema") {
            Ok(schema) => GrammarSource::JsonSchema(schema),
            Err(_) => return,
        },
        1 => GrammarSource::Lark(text),
        _ => GrammarSource::Regex(text),
    };
    confined(grammar::LIMITS, grammar::COMPILING, || {
        let Ok(grammar) = GRAMMARS.compile(&source, &|| true) else { return };
        let (rule, mut history) = (grammar.follow(0), Vec::new());
        for choice in choices {
            let Ok(Some(mask)) = rule.mask(&history) else { break };
            let allowed: Vec<Token> =
                (0..TOKENIZER.vocab() as Token).filter(|token| mask.allows(*token)).collect();
            if allowed.is_empty() {
                break;
            }
            history.push(allowed[usize::from(*choice) % allowed.len()]);
            rule.settle(&history);
        }
        let (mask, fresh) = (rule.mask(&history), grammar.follow(0).mask(&history));
        if let (Ok(mask), Ok(fresh)) = (mask, fresh) {
            assert!(mask == fresh, "a mask depends on the tokens alone");
        }
    });
}

fn schema(cursor: &mut Cursor<'_>) -> Vec<u8> {
    const KEYS: &str = r#"
        $ref $defs type properties required additionalProperties patternProperties propertyNames
        items prefixItems minItems maxItems uniqueItems contains minLength maxLength pattern
        format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf enum const anyOf
        oneOf allOf not if then else minProperties maxProperties $anchor description"#;
    static BASE: LazyLock<Value> = LazyLock::new(|| {
        json!({
            "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9},
                "t": {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}}},
            "type": "object",
            "properties": {
                "a": {"type": "string", "pattern": "^[a-z]{2,4}$", "maxLength": 4},
                "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1,
                    "maxItems": 3, "prefixItems": [{"const": "x"}, {"type": ["number", "null"]}]},
                "c": {"anyOf": [{"const": "x"}, {"enum": [1, null]},
                    {"format": "date", "type": "string"}]},
                "d": {"allOf": [{"type": "number", "multipleOf": 0.5}, {"exclusiveMaximum": 7}]},
                "e": {"$ref": "#/$defs/t"},
            },
            "required": ["a"], "additionalProperties": false,
        })
    });
    edited(cursor, &BASE, KEYS)
}

fn lark(cursor: &mut Cursor<'_>) -> Vec<u8> {
    const WORDS: &str = r#"
        start:· a:· b:· A:· B:· a b A B start ⏎ · ·|· + * ? {2} {1,3} {0,1000000} ~2 ( ) [ ] "x"
        "" "x"i "\n" /[0-9]{2}/ /a|b/ /.*/ /(?i:x)/s /[^"]*/ %ignore· %import·common.INT⏎
        %llguidance·{}⏎ %json·{"type":·"object"} %regex·{"substring_chars":·"abc"} ·&· ~
        [max_tokens=3] [stop="x"] [lazy] [temperature=0.5] <[1]> <[1-9]> <eos> <|x|> @x ->·y
        //·c⏎ [capture] [suffix="y"]"#;
    format!("start: {}", text_of(cursor, WORDS)).into_bytes()
}

fn regex(cursor: &mut Cursor<'_>) -> Vec<u8> {
    const WORDS: &str = r#"
        a b . * + ? | ( ) [ ] [^a] [a-z] \d \w \s \p{Lu} \P{L} {2} {2,} {1,9} {0,1000} {1000000}
        (?i: (?s: (?: (?= (?! ^ $ \b \x41 \u{1f600} \1 && -- [[:alpha:]] é"#;
    text_of(cursor, WORDS).into_bytes()
}

/// Reads a `gemma.toml` in the working directory. The first byte selects the command.
pub fn settings(data: &[u8]) {
    const COMMANDS: [&str; 6] = ["generate", "bench", "serve", "quantize", "eval", "chat"];
    /// Names of options in a file, such as `max-tokens`.
    static OPTIONS: LazyLock<Vec<String>> = LazyLock::new(|| {
        let root = commands::definition();
        let options = root.get_subcommands().flat_map(|command| command.get_arguments());
        options.filter_map(|option| option.get_long().map(str::to_owned)).collect()
    });
    const VALUES: &str = r#"
        1 0 -1 0.5 true false "a" "" [] [1,2] ["a","b"] {} {a=1} "4GB" "auto" "off" "cpu" "json"
        inf nan 9223372036854775807 1979-05-27 '''a''' 1e400"#;
    let Some((command, rest)) = data.split_first() else { return };
    let bytes = raw_or(rest, |cursor| {
        let mut text = String::new();
        while !cursor.is_empty() {
            if cursor.byte() % 4 == 0 {
                text += &format!("[{}]\n", cursor.one_of(&COMMANDS));
            }
            let option = &OPTIONS[cursor.index(OPTIONS.len())];
            text += &format!("{option} = {}\n", cursor.word_of(VALUES));
        }
        text.into_bytes()
    });
    file("gemma.toml", &bytes);
    std::env::set_current_dir(&*DIRECTORY).expect("the directory is there");
    let command = COMMANDS[usize::from(*command) % COMMANDS.len()];
    let _ = commands::parse(&["gemma".into(), command.into(), "x".into(), "y".into()]);
}

pub fn recipe(data: &[u8]) {
    const WORDS: &str = r#"
        about·=·"x"⏎ target-size·=·"9GB"⏎ target-size·=· [formats]⏎ ⏎ ·=· "norms" linears
        "{embed_tokens,lm_head}" "layers.*.mlp.{gate,up}_proj" "layers.0-3.*"
        "layers.9-1.self_attn.q_proj" "layers.-1.*" "*" "**" "{a,{b,c}}" "{" "as-is" "i8-row"
        "i4-g32" "i2-g128+h128" "t2-row+h128" "t2.5-row" "i8a-row" "bf16" "f32" "i4-g7" "i4-g0"
        "i4-g99999999999" "3.5bpw" "9·GiB" "0" [ ] ,· # " 1 true [formats.a]⏎ [[formats]]⏎"#;
    let bytes = raw_or(data, |cursor| text_of(cursor, WORDS).into_bytes());
    if let Ok(text) = std::str::from_utf8(&bytes) {
        let _ = Recipe::parse("fuzzed", text);
    }
}
