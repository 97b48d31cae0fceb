//! Decides whether the memory of a pod's VM is in huge pages: from its annotation, else its limits, else the
//! configuration.

use std::collections::HashMap;

use k8s_cri::v1::LinuxContainerResources;

/// Annotation that requests huge pages.
const ANNOTATION: &str = "io.sandboxer.huge-pages";
/// Values of the annotation: the size of the pages in Kubernetes' notation, or none.
const HUGE: &str = "2Mi";
const NONE: &str = "none";
/// Size of the pages in CRI's notation.
const PAGE_SIZE: &str = "2MB";

/// Returns whether a pod with these `annotations` and `limits` requests huge pages; the default is `configured`.
pub fn asked(
    annotations: &HashMap<String, String>,
    limits: &LinuxContainerResources,
    configured: bool,
) -> Result<bool, String> {
    let mut limited = limits.hugepage_limits.iter().filter(|limit| limit.limit > 0);
    if let Some(other) = limited.clone().find(|limit| limit.page_size != PAGE_SIZE) {
        let size = &other.page_size;
        return Err(format!(
            "it has a limit of huge pages of {size}: pods can have huge pages of {PAGE_SIZE}"
        ));
    }
    match annotations.get(ANNOTATION).map(String::as_str) {
        None => Ok(configured || limited.next().is_some()),
        Some(HUGE) => Ok(true),
        Some(NONE) if limited.next().is_some() => Err(format!(
            "annotation {ANNOTATION} is {NONE:?}, and it has a limit of huge pages: remove one of them"
        )),
        Some(NONE) => Ok(false),
        Some(text) => Err(format!("annotation {ANNOTATION} is {text:?}: it takes {HUGE:?} or {NONE:?}")),
    }
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::HugepageLimit;

    use super::*;

    fn limits(of: &[(&str, u64)]) -> LinuxContainerResources {
        let limit =
            |(size, limit): &(&str, u64)| HugepageLimit { page_size: (*size).to_owned(), limit: *limit };
        LinuxContainerResources { hugepage_limits: of.iter().map(limit).collect(), ..Default::default() }
    }

    fn annotated(text: &str) -> HashMap<String, String> {
        [(ANNOTATION.to_owned(), text.to_owned())].into()
    }

    #[test]
    fn annotation_then_limits_then_configuration_decide() {
        let (none, says_none) = (limits(&[("2MB", 0), ("1GB", 0)]), HashMap::new());
        assert_eq!(asked(&says_none, &none, false), Ok(false), "as kubelet sends it for other pods");
        assert_eq!(asked(&says_none, &none, true), Ok(true));
        assert_eq!(asked(&says_none, &limits(&[("2MB", 64 << 20)]), false), Ok(true));
        assert_eq!(asked(&annotated("2Mi"), &none, false), Ok(true));
        assert_eq!(asked(&annotated("none"), &none, true), Ok(false));
    }

    #[test]
    fn what_pods_cannot_have_is_refused_by_name() {
        let refused = |annotations, limits: &[(&str, u64)]| {
            asked(&annotations, &self::limits(limits), false).unwrap_err()
        };
        let text = refused(HashMap::new(), &[("2MB", 2 << 20), ("1GB", 1 << 30)]);
        assert!(text.contains("1GB") && text.contains("2MB"), "{text}");
        for bad in ["1Gi", "true", ""] {
            let text = refused(annotated(bad), &[]);
            assert!(text.contains(ANNOTATION) && text.contains("\"2Mi\" or \"none\""), "{text}");
        }
        let text = refused(annotated("none"), &[("2MB", 2 << 20)]);
        assert!(text.contains("remove one of them"), "{text}");
    }
}
