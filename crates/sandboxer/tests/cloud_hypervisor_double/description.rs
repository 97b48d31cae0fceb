//! The API as it is published: its calls, their arguments and their answers.
//!
//! `description.json` holds the facts of the project's OpenAPI file as of v53, for the calls that the driver
//! uses, and `net_fds` of `vm.restore`, which that file lacks: `!` marks a required field, `[T]` is an array, `{T}` an object of any keys, `>=n` a minimum, an array of
//! words an enumeration.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

/// Everything that is published.
#[derive(Deserialize)]
pub struct Description {
    calls: BTreeMap<String, Call>,
    types: BTreeMap<String, Type>,
}

/// One call.
#[derive(Deserialize)]
pub struct Call {
    pub method: String,
    pub body: Option<String>,
    pub answer: Option<String>,
    pub statuses: Vec<u16>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Type {
    Enumeration(Vec<String>),
    Other(String),
    Object(BTreeMap<String, String>),
}

impl Description {
    pub fn published() -> Self {
        serde_json::from_str(include_str!("description.json")).expect("the description is well-formed")
    }

    pub fn call(&self, name: &str) -> Option<&Call> {
        self.calls.get(name)
    }

    /// Renames a field of a type, for the tests of the suite.
    pub fn rename(&mut self, kind: &str, field: &str, to: &str) {
        let Some(Type::Object(fields)) = self.types.get_mut(kind) else {
            panic!("{kind} is no described object")
        };
        let (old, field_kind) = [field.to_owned(), format!("{field}!")]
            .into_iter()
            .find_map(|name| fields.remove_entry(&name))
            .unwrap_or_else(|| panic!("{kind} has no field {field}"));
        fields.insert(old.replacen(field, to, 1), field_kind);
    }

    /// Checks that `value` is of type `kind`; `Err` says where it is not. Fields that are not described, which the
    /// real API would ignore, are refused too: everything that the driver sends has a meaning.
    pub fn check(&self, kind: &str, value: &Value) -> Result<(), String> {
        let fits = |fine: bool| match fine {
            true => Ok(()),
            false => Err(format!("invalid type: {value}, expected {kind}")),
        };
        if let Some(item) = kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
            let values = value.as_array().ok_or_else(|| format!("{value} is no array"))?;
            return values.iter().try_for_each(|value| self.check(item, value));
        }
        if let Some(item) = kind.strip_prefix('{').and_then(|kind| kind.strip_suffix('}')) {
            let values = value.as_object().ok_or_else(|| format!("{value} is no object"))?;
            return values.values().try_for_each(|value| self.check(item, value));
        }
        match (kind, self.types.get(kind)) {
            ("string", _) => fits(value.is_string()),
            ("boolean", _) => fits(value.is_boolean()),
            ("object", _) => fits(value.is_object()),
            ("integer", _) => fits(value.is_i64() || value.is_u64()),
            (_, Some(Type::Enumeration(words))) => {
                fits(value.as_str().is_some_and(|value| words.iter().any(|word| word == value)))
            }
            (_, Some(Type::Other(other))) => self.check(other, value),
            (_, Some(Type::Object(fields))) => {
                let value = value.as_object().ok_or_else(|| format!("{value} is no {kind}"))?;
                self.check_object(kind, fields, value)
            }
            (_, None) => {
                let least = kind.strip_prefix("integer>=").expect("all types are described");
                let least: i64 = least.parse().expect("a least value is a number");
                fits(value.as_i64().is_some_and(|value| value >= least))
            }
        }
    }

    fn check_object(
        &self,
        kind: &str,
        fields: &BTreeMap<String, String>,
        value: &Map<String, Value>,
    ) -> Result<(), String> {
        for (field, kind_of_field) in fields {
            match (value.get(field.trim_end_matches('!')), field.ends_with('!')) {
                (None, true) => return Err(format!("{kind} lacks `{}`", field.trim_end_matches('!'))),
                (None, false) => {}
                (Some(value), _) => {
                    self.check(kind_of_field, value).map_err(|why| format!("{kind}.{field}: {why}"))?;
                }
            }
        }
        let described = |name: &String| fields.contains_key(name) || fields.contains_key(&format!("{name}!"));
        match value.keys().find(|name| !described(name)) {
            Some(unknown) => Err(format!("{kind} has no field `{unknown}`")),
            None => Ok(()),
        }
    }
}
