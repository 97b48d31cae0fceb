//! What a template says of itself. None is taken whose files are not beside it.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sandboxer::{fuzzing::template, template::TemplateError};

fuzz_target!(|text: &[u8]| {
    let taken = match template(text, Path::new("/templates/other")) {
        // In its own directory, then.
        Err(TemplateError::Foreign { key, .. }) => template(text, &Path::new("/templates").join(&key)),
        other => other,
    };
    for name in taken.unwrap_or_default() {
        assert_eq!(Path::new(&name).components().count(), 1, "{name:?}");
    }
});
