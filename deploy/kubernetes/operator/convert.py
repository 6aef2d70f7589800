"""``python -m bagua.operator.convert FILE``: BaguaJobs out of manifests of the original's kind `Bagua` (``bagua
convert-manifest`` runs this). Pure, but for ``main``."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bagua.base.errors import ConfigError
from bagua.operator.job import AUTO, GROUP, KIND, VERSION, parse

Manifest = dict[str, Any]
OLD_GROUP = "bagua.kuaishou.com"
LAUNCHERS = ("bagua.distributed.launch", "bagua.distributed.run", "torch.distributed.launch", "torch.distributed.run")
RESTART = {"": "OnFailure", "Always": "OnFailure", "OnFailure": "OnFailure", "Never": "Never", "ExitCode": "ExitCode"}


def convert(old: Manifest) -> tuple[Manifest, list[str]]:
    """Returns (the BaguaJob, notes for people on what could not be taken over). Raises ConfigError for a manifest that
    is no `Bagua`, or names no program.
    """
    if old.get("kind") != "Bagua" or not str(old.get("apiVersion", "")).startswith(f"{OLD_GROUP}/"):
        raise ConfigError(
            f"Not a manifest of kind Bagua of {OLD_GROUP}: {old.get('apiVersion')}, {old.get('kind')}. [BG832]"
        )
    notes: list[str] = []
    spec = old.get("spec") or {}
    roles = {name.lower(): value for name, value in (spec.get("replicaSpecs") or {}).items()}
    worker = roles.get("worker") or roles.get("master")
    if worker is None:
        raise ConfigError("spec.replicaSpecs has neither a worker nor a master. [BG832]")
    if "etcd" in roles:
        notes.append("etcd is left out: the coordinator decides about membership.")
    template = worker.get("template") or {}
    pod = dict(template.get("spec") or {})
    container, others = _containers(pod.pop("containers", []))
    run, ranks = _run([*container.pop("command", []), *container.pop("args", [])], notes)
    if "workingDir" in container:
        run["workdir"] = container.pop("workingDir")
    plain = [one for one in container.get("env", []) if "value" in one]
    run["env"] = [{"name": one["name"], "value": str(one["value"])} for one in plain]
    container["env"] = [one for one in container.get("env", []) if "value" not in one]
    if pod.pop("hostNetwork", None):
        notes.append(
            "hostNetwork is left out: pods have addresses of their own. Add it to spec.template if you need it."
        )
    pod.pop("restartPolicy", None)
    made: Manifest = {"image": container.pop("image", ""), "nprocPerNode": ranks, "run": run}
    if container.get("imagePullPolicy"):
        made["imagePullPolicy"] = container.pop("imagePullPolicy")
    if container.get("resources"):
        made["resources"] = container.pop("resources")
    made |= _replicas(spec, roles, notes)
    if kept := _template(pod, container, others, template.get("metadata") or {}):
        made["template"] = kept
    policy = _policy(spec.get("runPolicy") or {}, str(worker.get("restartPolicy") or ""), notes)
    if policy:
        made["runPolicy"] = policy
    metadata = _part(old.get("metadata") or {}, "name", "namespace", "labels")
    parse(made)
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": made}, notes


def _part(whole: Manifest, *names: str) -> Manifest:
    return {key: value for key, value in whole.items() if key in names}


def _containers(found: list[Manifest]) -> tuple[Manifest, list[Manifest]]:
    """Returns (a copy of the one with the program, the others)."""
    if not found:
        raise ConfigError("The template of the worker has no container. [BG832]")
    main = next((one for one in found if one.get("name") == "bagua"), found[0])
    return dict(main), [one for one in found if one.get("name") != main.get("name")]


def _template(pod: Manifest, container: Manifest, others: list[Manifest], metadata: Manifest) -> Manifest:
    """``spec.template``: all that has no field of its own in a BaguaJob."""
    rest = {key: value for key, value in container.items() if key not in ("name", "ports") and value}
    inner = {**pod, **({"containers": [{**rest, "name": "daemon"}, *others]} if rest or others else {})}
    kept = _part(metadata, "labels", "annotations")
    return {**({"metadata": kept} if kept else {}), **({"spec": inner} if inner else {})}


def _replicas(spec: Manifest, roles: Manifest, notes: list[str]) -> Manifest:
    """Joins the replicas of master and workers: the master of the original was the first node."""
    count = sum(int(roles[role].get("replicas", 1)) for role in ("master", "worker") if role in roles)
    if not spec.get("enableElastic"):
        return {"replicas": count}
    least = int(spec.get("minReplicas") or 1)
    most = int(spec.get("maxReplicas") or count)
    notes.append("Elastic: ranks go on when pods come and go, if the script is written for it (docs/elastic.md).")
    return {
        "replicas": max(least, min(count, most)),
        "elastic": {"minReplicas": least, "maxReplicas": max(least, most)},
    }


def _run(command: list[str], notes: list[str]) -> tuple[Manifest, int | str]:
    """Returns (spec.run, ranks of each pod), out of the launcher's command line."""
    words = _unwrapped([str(part) for part in command])
    if not words:
        raise ConfigError("The container of the worker has no command: its image's own can't be seen here. [BG832]")
    ranks: int | str = 1
    rest = words
    found = next((number for number, word in enumerate(words) if word in LAUNCHERS), None)
    if found is None and Path(words[0]).name in ("baguarun", "torchrun"):
        found = 0
    if found is not None:
        ranks, rest = _launched(words[found + 1 :])
    elif re.fullmatch(r"python[0-9.]*", Path(words[0]).name):
        rest = words[1:]
    else:
        notes.append(f"{words[0]} is run once in each pod, as a program.")
        return {"program": words[0], "args": words[1:]}, 1
    if not rest or (rest[0] in ("-m", "--module") and len(rest) == 1):
        raise ConfigError(f"No script or module in the command {shlex.join(words)}. [BG832]")
    if rest[0] in ("-m", "--module"):
        return {"module": rest[1], "args": rest[2:]}, ranks
    return {"script": rest[0], "args": rest[1:]}, ranks


def _unwrapped(words: list[str]) -> list[str]:
    """``bash -c "COMMAND"`` -> the words of a plain command."""
    if len(words) == 3 and Path(words[0]).name in ("sh", "bash") and words[1] == "-c":
        try:
            return shlex.split(words[2])
        except ValueError as error:
            raise ConfigError(f"The command {words[2]!r} can't be read: {error}.") from error
    return words


def _launched(words: list[str]) -> tuple[int | str, list[str]]:
    """Returns (--nproc_per_node, what follows the launcher's options)."""
    ranks: int | str = 1
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
        name, joined, value = rest.pop(0).partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name in ("standalone", "no_python", "use_env", "autotune_level_zero"):
            continue
        if not joined:
            value = rest.pop(0) if rest else ""
        if name == "nproc_per_node":
            if not value.isdigit() and value not in ("auto", "gpu", "cpu"):
                raise ConfigError(f"--nproc_per_node {value} can't be read: write a number. [BG832]")
            ranks = int(value) if value.isdigit() else AUTO
    return ranks, rest


def _policy(old: Manifest, restart: str, notes: list[str]) -> Manifest:
    found: Manifest = {}
    for name in ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"):
        if old.get(name) is not None:
            found[name] = old[name]
    if restart:
        found["restartPolicy"] = RESTART.get(restart, "OnFailure")
        if restart == "Always":
            notes.append("restartPolicy Always became OnFailure: a job that has succeeded is over.")
    scheduling = old.get("schedulingPolicy") or {}
    new = {key: scheduling[key] for key in ("queue", "priorityClass") if scheduling.get(key)}
    if scheduling.get("minAvailable") is not None:
        notes.append("schedulingPolicy.minAvailable is left out: the minimum of an elastic job is elastic.minReplicas.")
    if new:
        found["schedulingPolicy"] = new
    return found


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifests of kind Bagua; others pass as they are.")],
) -> None:
    """Prints BaguaJobs for the original's manifests of kind Bagua. Notes go to standard error."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError('yaml is not installed: pip install "bagua[kubernetes]" [BG209]') from error
    try:
        documents = [one for one in yaml.safe_load_all(file.read_text("utf-8")) if one]
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}. [BG109]") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} can't be read: {error} [BG109]") from error
    made = []
    for one in documents:
        new, notes = convert(one) if isinstance(one, dict) and one.get("kind") == "Bagua" else (one, [])
        made.append(new)
        for note in notes:
            print(f"{new['metadata'].get('name', 'a manifest without a name')}: {note}", file=sys.stderr)
    print(yaml.safe_dump_all(made, sort_keys=False), end="")


def main() -> None:
    """Runs the command line of the conversion."""
    from bagua.operator.__main__ import command_line

    command_line(run, "bagua convert-manifest")


if __name__ == "__main__":
    main()
