//! Many pods, one after the other and all at once.

use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use sandboxer_e2e::case::{Case, shell};

crate::cases![Vm: one_after_the_other; VmAlone: twenty_at_once];

/// 5 by default; SANDBOXER_E2E_SEQUENCE=200 for the long run.
async fn one_after_the_other(case: Case) -> Result<()> {
    let count = match std::env::var("SANDBOXER_E2E_SEQUENCE") {
        Ok(count) => count.parse().context("SANDBOXER_E2E_SEQUENCE")?,
        Err(_) => 5,
    };
    for n in 0..count {
        let pod = case.pod().await.with_context(|| format!("pod {n}"))?;
        let output = pod.output(&format!("echo {n}")).await.with_context(|| format!("pod {n}"))?;
        ensure!(output == n.to_string(), "pod {n} said {output}");
        case.cri.stop_pod(&pod.id).await?;
        case.cri.remove_pod(&pod.id).await?;
    }
    Ok(())
}

async fn twenty_at_once(case: Case) -> Result<()> {
    let pods = join_all((0..20).map(|n| {
        let case = &case;
        async move {
            let pod = case.pod().await.with_context(|| format!("pod {n}"))?;
            let ended =
                pod.run(shell("c", &format!("echo {n}"))).await.with_context(|| format!("pod {n}"))?;
            let output = ended.success()?;
            ensure!(output == n.to_string(), "pod {n} said {output}");
            Ok(())
        }
    }))
    .await;
    pods.into_iter().collect::<Result<()>>()?;
    ensure!(case.stack.vmms()?.len() == 20, "{} VMMs for 20 pods", case.stack.vmms()?.len());
    case.clean_up().await?;
    ensure!(case.stack.vmms()?.is_empty(), "VMMs are left after every pod was removed");
    Ok(())
}
