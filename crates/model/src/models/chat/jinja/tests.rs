use super::*;
use serde_json::Value as Json;

/// Templates with their renderings by jinja2, written by `scripts/golden/templates.py`.
const GOLDEN: &str = include_str!("../../../../../../tests/golden/templates.json");

fn golden() -> Json {
    serde_json::from_str(GOLDEN).unwrap()
}

fn rendered(template: &str) -> Result<String, Fault> {
    let golden = golden();
    let now = serde_json::from_value(golden["now"].clone()).unwrap();
    render(template, Value::from_serialize(&golden["variables"]), now)
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let golden = golden();
    let mut wrong = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let template = case["template"].as_str().unwrap();
        let got = rendered(template).ok();
        // jinja2 also rejects templates for which the file has no text.
        if got.as_deref() != case["text"].as_str() {
            wrong.push(format!("{template}\n  {got:?}\n  {case}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_fault_names_what_is_wrong_and_its_own_remedy() {
    let cases = [
        ("{{ raise_exception('take turns') }}", "refuses these messages: take turns", "change the"),
        ("{% if %}", "cannot be read, line 1", "download"),
        ("\n{{ 'a' | nope }}", "lacks, line 2: filter nope", "report"),
        ("{{ nope('a') }}", "lacks, line 1: nope", "report"),
        ("{{ 'a'.nope() }}", "lacks, line 1: string has no method named nope", "report"),
        ("{{ 1 is nope }}", "lacks, line 1: test nope", "report"),
        ("{{ messages[0].nope.deep }}", "a field that is not there, line 1", "fields"),
        ("{% macro f() %}{{ varargs }}{% endmacro %}{{ f(1) }}", "wrong arguments", "varargs"),
        ("{{ 'a' + 1 }}", "fails, line 1", "correct that line"),
        ("{{ '%r' % 'x' }}", "conversion type 'r'", "correct that line"),
        ("{{ 1 // 0 }}", "division by zero", "correct that line"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "does not end within",
            "shorten",
        ),
    ];
    let mut wrong = Vec::new();
    for (template, what, remedy) in cases {
        let fault = rendered(template).unwrap_err();
        if !fault.what.contains(what) || !fault.help.as_ref().unwrap().contains(remedy) {
            wrong.push(format!("{template}: {fault:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
