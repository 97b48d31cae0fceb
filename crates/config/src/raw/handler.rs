//! A runtime handler: a start path, or a table of what its pods get.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        Error, MapAccess, Visitor,
        value::{MapAccessDeserializer, StrDeserializer},
    },
};

use crate::{Handler, StartPath, VmmName};

/// A handler as written: `"boot"`, or `{ vmm = "firecracker", start_path = "boot" }`.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct RawHandler(Table);

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct Table {
    start_path: Option<StartPath>,
    vmm: Option<VmmName>,
}

impl RawHandler {
    /// Returns the handler with its defaults.
    pub fn resolve(self) -> Handler {
        let Self(Table { start_path, vmm }) = self;
        Handler { start_path: start_path.unwrap_or_default(), vmm }
    }
}

// Implemented by hand, because the errors of an untagged enum do not say what is wrong.
impl<'de> Deserialize<'de> for RawHandler {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Written)
    }
}

struct Written;

impl<'de> Visitor<'de> for Written {
    type Value = RawHandler;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a start path in quotes, or a table with vmm and start_path")
    }

    fn visit_str<E: Error>(self, path: &str) -> Result<RawHandler, E> {
        let start_path = StartPath::deserialize(StrDeserializer::new(path))?;
        Ok(RawHandler(Table { start_path: Some(start_path), vmm: None }))
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<RawHandler, A::Error> {
        Table::deserialize(MapAccessDeserializer::new(table)).map(RawHandler)
    }
}
