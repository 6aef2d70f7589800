"""Blocks of pages about container images, as they stand, on a copy of this machine that is thrown away: images are
built by buildah, run by podman, and pushed to a registry. Their base is made by debootstrap.

Some gigabytes are fetched, because torch comes along with CUDA, and 20 GB are needed on the disk.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from rig.docs import pages
from rig.limits import SOON_S
from rig.system import throwaway
from rig.system.throwaway import Throwaway

import bagua

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(5400)]

INSTALL_S = 30 * SOON_S
PROGRAMS = "buildah podman crun fuse-overlayfs netavark aardvark-dns iptables debootstrap docker-registry openssl curl"
BASE = """
cd /root
debootstrap --variant=minbase --include=ca-certificates "$(. /etc/os-release; echo $VERSION_CODENAME)" base >&2
cp -r /usr/local/share/ca-certificates base/usr/local/share/
chroot base update-ca-certificates >&2
made=$(buildah from scratch)
buildah add --quiet "$made" base / >&2
env | grep ^PIP_ | while read -r one; do buildah config --env "$one" "$made"; done
buildah commit --quiet "$made" docker.io/library/debian >&2
buildah rm "$made" >&2
rm -r base
podman image inspect --format '{{.Digest}}' debian
"""
"""A Debian of this machine's release, that trusts whom this machine trusts; the last line says its digest."""
SETTINGS = """
export BUILDAH_ISOLATION=chroot
mkdir -p /etc/containers
printf '[containers]\\ncgroups = "disabled"\\n' > /etc/containers/containers.conf
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
"""
"""Containers run without limits: this machine may have none to give."""
ALONE = """
ip link set lo up
ip addr add 10.0.0.1/24 dev lo
ip addr add 10.0.0.2/24 dev lo
cd /root
"""
"""A network of its own, with the addresses of the coordinator's host and of a node."""
CONNECTED = "until podman exec coordinator bagua node list | grep -q connected; do sleep 0.5; done"
REFUSED = """
echo '{"apiVersion": "v1", "kind": "Config", "current-context": "none", "users": [{"name": "none", "user": {}}],
  "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
  "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}]}' > nowhere
chmod 644 nowhere
podman run --rm --network none -v ./nowhere:/nowhere bagua-coordinator:VERSION operator --kubeconfig /nowhere ||
    echo "code $?"
"""
REGISTRY = """
echo 127.0.0.1 registry.example.org >> /etc/hosts
openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=registry.example.org \\
    -addext subjectAltName=DNS:registry.example.org -keyout key.pem -out cert.pem
install -D cert.pem /etc/containers/certs.d/registry.example.org/ca.crt
cat > registry.yml <<END
version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: /root/registry}}
http: {addr: "127.0.0.1:443", tls: {certificate: /root/cert.pem, key: /root/key.pem}}
END
docker-registry serve registry.yml > registry.log 2>&1 &
until curl -sf --cacert cert.pem https://registry.example.org/v2/; do sleep 0.2; done
"""
"""One of the name on the page, with a certificate of its own."""
PULLED = """
pulled=$(podman pull --quiet registry.example.org/bagua-node:1.0.0.dev0)
test "$pulled" = "$(podman image inspect --format '{{.Id}}' bagua-node:VERSION)"
podman run --rm --network none registry.example.org/bagua-node:1.0.0.dev0 --version
"""


class Host(Throwaway):
    """A machine with buildah, podman, a registry and an image of Debian."""

    digest = ""

    def type(self, text):
        """Commands of a page for somebody in a checkout; their output."""
        for word, meaning in {"sha256:…": self.digest, "VERSION": bagua.__version__}.items():
            text = text.replace(word, meaning)
        here = f"cd {pages.ROOT}; export BAGUA_VENV={sys.prefix} PATH={Path(sys.prefix) / 'bin'}:$PATH"
        return self.sh(f"{SETTINGS}\n{here}\n{text}", INSTALL_S)

    def alone(self, *texts):
        """The same on a host and a node that see nobody else."""
        text = "\n".join((ALONE, *texts))
        for word, meaning in {"HOST": "10.0.0.1", "ADDRESS": "10.0.0.2"}.items():
            text = re.sub(rf"\b{word}\b", meaning, text)
        return self.type(f"unshare --net sh -euc {shlex.quote(text)}")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    if reason := throwaway.reason_to_skip(folder):
        pytest.skip(reason)
    if not Path("/dev/fuse").exists():
        pytest.skip("no /dev/fuse: images can't be kept on an overlay")
    made = Host(folder)
    try:
        install = f"apt-get update && apt-get install --yes --no-install-recommends {PROGRAMS}"
        if (probe := made.attempt(install, INSTALL_S)).returncode:
            pytest.skip(f"no packages of the distribution can be fetched: {probe.stdout.strip().splitlines()[-1]}")
        made.digest = made.sh(f"{SETTINGS}\n{BASE}", INSTALL_S).splitlines()[-1]
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes


@pytest.fixture(scope="module")
def built(host):
    """That host, with the images of docs/install.md."""
    for command in pages.run_by("test_images_are_built", "docs/install.md"):
        host.type(command)
    return host


def test_images_are_built(built):
    """Their user is nobody. The coordinator's image has all that the operator imports: the first thing that is missing
    is an API server."""
    for name in ("bagua-coordinator", "bagua-node"):
        said = built.alone(f"podman run --rm --network none --entrypoint id {name}:VERSION -u")
        assert said.endswith("10001\n"), said
    said = built.alone(REFUSED)
    assert "http://127.0.0.1:1 does not answer" in said and said.endswith("code 2\n"), said


def test_containers_train(built):
    coordinator, node, commands = pages.texts_run_by("test_containers_train", "docs/install.md")
    said = built.alone(coordinator, node, CONNECTED, commands)
    assert " connected " in said and "Job announcement succeeded" in said, said


def test_an_image_is_pushed(built):
    """The tutorial builds it by a command of docs/install.md, which takes minutes: that has been done."""
    build, push = pages.run_by("test_an_image_is_pushed", "docs/tutorials/kubernetes.md")
    assert build in pages.run_by("test_images_are_built", "docs/install.md")
    said = built.alone(REGISTRY, push, PULLED)
    assert said.endswith(f"bagua {bagua.__version__}\n"), said
