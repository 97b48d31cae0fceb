//! Host ports that lead to a pod in the host's network, from the pod's annotation.

use std::collections::HashMap;

/// Annotation with the host ports that lead to a pod in the host's network.
pub const ANNOTATION: &str = "io.sandboxer.host-ports";

/// Maximum number of host ports per pod.
const MAX: usize = 64;

/// Returns the host ports that these annotations request. `own_network`: whether the pod has its own network.
pub fn asked(annotations: &HashMap<String, String>, own_network: bool) -> Result<Vec<u16>, String> {
    match annotations.get(ANNOTATION) {
        Some(_) if own_network => Err(format!(
            "annotation {ANNOTATION} is for pods in the host's network (hostNetwork): others are reached at \
             their own address, or by a hostPort"
        )),
        Some(text) => ports(text),
        None => Ok(Vec::new()),
    }
}

/// Parses TCP ports, as in `8080, 9090/tcp`.
fn ports(text: &str) -> Result<Vec<u16>, String> {
    let wrong = |what: &str| {
        format!(
            "annotation {ANNOTATION} is {text:?}, {what}: it takes TCP ports such as \"8080, 9090\", at most \
             {MAX}"
        )
    };
    let mut ports = Vec::new();
    for word in text.split(',').map(str::trim) {
        let (number, protocol) = word.split_once('/').unwrap_or((word, "tcp"));
        if !protocol.eq_ignore_ascii_case("tcp") {
            return Err(wrong(&format!("and {protocol:?} is not carried")));
        }
        match number.parse() {
            Ok(port) if port > 0 && !ports.contains(&port) => ports.push(port),
            _ => return Err(wrong(&format!("and {word:?} is no port, or one named twice"))),
        }
    }
    if ports.len() > MAX {
        return Err(wrong("which are too many"));
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_of_tcp_each_named_once() {
        assert_eq!(ports("8080, 9090/tcp").unwrap(), [8080, 9090]);
        for bad in ["", "0", "80,80", "70000", "53/udp", "80;81", &vec!["1"; 65].join(",")] {
            let text = ports(bad).unwrap_err();
            assert!(text.contains(ANNOTATION) && text.contains("TCP ports"), "{bad:?}: {text}");
        }
        let many = (1..=65).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
        assert!(ports(&many).is_err());
    }
}
