//! What an image is made of before the agent is added: an archive of busybox or of a Debian system.
//!
//! Kept apart from the images, so that a change of the agent does not install Debian again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cache::Cache;
use crate::progress::Step;
use crate::{digest, host, repository};

/// Raised when the steps below change what comes out of the same inputs.
const RECIPE: &str = "1";
/// From Debian's package debian-archive-keyring, which every Debian has.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// `[build]` of a template.
#[derive(Debug, Deserialize)]
#[serde(tag = "from", rename_all = "lowercase", deny_unknown_fields)]
pub enum Recipe {
    Busybox,
    Debian { suite: String, packages: Vec<String> },
}

impl Recipe {
    /// The packages by whose versions a reader knows the image.
    pub fn packages(&self) -> Vec<String> {
        match self {
            Self::Busybox => vec!["busybox-static".to_owned()],
            Self::Debian { packages, .. } => packages.clone(),
        }
    }

    fn script(&self) -> PathBuf {
        let name = match self {
            Self::Busybox => "busybox.sh",
            Self::Debian { .. } => "debian.sh",
        };
        repository().join("rootfs").join(name)
    }
}

/// The folder with `tree.tar` and `packages.txt` (name and version of each package, a line each).
pub fn get(cache: &Cache, name: &str, recipe: &Recipe) -> Result<PathBuf> {
    host::need(cache, host::ROOTFS)?;
    let source = match recipe {
        Recipe::Busybox => version_of("busybox-static")?,
        Recipe::Debian { suite, .. } => sources(cache, suite)?,
    };
    let script = fs::read_to_string(recipe.script())?;
    let key = digest::of_parts([RECIPE, &format!("{recipe:?}"), &script, &source]);
    cache.folder(&format!("trees/{name}-{}", digest::short(&key)), |dir| make(cache, recipe, dir))
}

/// Makes the same in `out`, whatever the cache has.
pub fn make(cache: &Cache, recipe: &Recipe, out: &Path) -> Result<()> {
    host::need_root("making a root filesystem, whose files belong to their users,")?;
    host::need(cache, host::ROOTFS)?;
    match recipe {
        Recipe::Busybox => busybox(cache, &recipe.script(), out),
        Recipe::Debian { suite, packages } => debian(cache, &recipe.script(), suite, packages, out),
    }
}

fn busybox(cache: &Cache, script: &Path, out: &Path) -> Result<()> {
    let step = Step::begin(cache, "busybox: make the tree")?;
    let tree = out.join("files");
    fs::create_dir(&tree)?;
    step.run(Command::new(script).arg(&tree))?;
    step.run(
        Command::new("tar")
            .args(["--sort=name", "--numeric-owner", "--mtime=@1767225600", "-cf"])
            .arg(out.join("tree.tar"))
            .arg("-C")
            .arg(&tree)
            .arg("."),
    )?;
    fs::remove_dir_all(&tree)?;
    let version = version_of("busybox-static")?;
    Ok(fs::write(out.join("packages.txt"), format!("busybox-static {version}\n"))?)
}

fn debian(cache: &Cache, script: &Path, suite: &str, packages: &[String], out: &Path) -> Result<()> {
    let step = Step::begin(cache, &format!("Debian {suite}: install packages"))?;
    let sources_file = out.join("sources");
    fs::write(&sources_file, sources(cache, suite)?)?;
    let packages_file = out.join("packages.txt");
    let list = format!(
        "chroot \"$1\" dpkg-query -W -f='${{Package}} ${{Version}}\\n' | sort >'{}'",
        packages_file.display()
    );
    // Documentation is left out, except what the licences ask for.
    let unread = ["/usr/share/doc/*", "/usr/share/info/*", "/usr/share/man/*", "/usr/share/locale/*"];
    let mut command = Command::new("mmdebstrap");
    command
        .env("LC_ALL", "C")
        .env("TMPDIR", out)
        .args(["--mode=root", "--variant=minbase", "--format=tar"])
        .args(unread.map(|path| format!("--dpkgopt=path-exclude={path}")))
        .arg("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        .arg(format!("--include={}", packages.join(",")))
        .arg(format!("--customize-hook={} \"$1\"", script.display()))
        .arg(format!("--customize-hook={list}"))
        .arg(suite)
        .arg(out.join("tree.tar"))
        .arg("-");
    let input = fs::File::open(&sources_file)?;
    step.run_with(&mut command, Stdio::from(input))?;
    Ok(fs::remove_file(&sources_file)?)
}

/// Where this machine's apt gets packages of `suite` from, so that the image comes from the same mirror, and from no other
/// source the machine may have.
fn sources(cache: &Cache, suite: &str) -> Result<String> {
    let known = || -> Result<String> {
        let output = Command::new("apt-get")
            .args(["indextargets", "--format", "$(ORIGIN) $(CODENAME) $(COMPONENT) $(REPO_URI) $(RELEASE)"])
            .arg("Created-By: Packages")
            .output()
            .context("cannot start apt-get")?;
        Ok(lines_of(&String::from_utf8_lossy(&output.stdout), suite))
    };
    let mut lines = known()?;
    if lines.is_empty() && host::is_root() {
        Step::begin(cache, "refresh the package lists")?.run(host::apt_get().arg("update"))?;
        lines = known()?;
    }
    if lines.is_empty() {
        bail!(
            "apt knows no Debian {suite}: add a mirror of it to /etc/apt/sources.list, then run `apt-get update`"
        );
    }
    Ok(lines)
}

/// Lines of a sources.list, from `ORIGIN CODENAME COMPONENT URI RELEASE`.
fn lines_of(targets: &str, suite: &str) -> String {
    let wanted = [suite.to_owned(), format!("{suite}-updates"), format!("{suite}-security")];
    let line = |target: &str| match target.split_whitespace().collect::<Vec<_>>().as_slice() {
        ["Debian", codename, "main", uri, release] if wanted.iter().any(|wanted| wanted == codename) => {
            Some(format!("deb [signed-by={KEYRING}] {uri} {release} main\n"))
        }
        _ => None,
    };
    targets.lines().filter_map(line).collect()
}

fn version_of(package: &str) -> Result<String> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f=${Version}", package])
        .output()
        .context("cannot start dpkg-query")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debians_own_main_of_that_suite_is_a_source() {
        let targets = "Debian bookworm main http://mirror/debian/ stable\n\
             Debian bookworm non-free http://mirror/debian/ stable\n\
             Debian bookworm-backports main http://mirror/debian/ bookworm-backports\n\
             Debian bookworm-security main http://mirror/security/ stable-security\n\
             Docker bookworm main http://other/ bookworm\n\
             Debian trixie main http://mirror/debian/ trixie\n";
        assert_eq!(
            lines_of(targets, "bookworm"),
            format!(
                "deb [signed-by={KEYRING}] http://mirror/debian/ stable main\n\
                 deb [signed-by={KEYRING}] http://mirror/security/ stable-security main\n"
            )
        );
    }
}
