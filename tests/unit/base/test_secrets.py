"""Which variables are secrets, and what a daemon's environment passes on to ranks."""

import pytest

from bagua.base.secrets import looks_secret, shown
from bagua.daemon.node.ranks.environment import passed_on

SECRETS = """
    HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY OPENAI_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID
    AWS_SESSION_TOKEN AZURE_CLIENT_SECRET PGPASSWORD MYSQL_PWD DB_PASSWORD POSTGRES_PASSWD SSH_PASSPHRASE
    GITHUB_PAT SLURM_JWT apiKey api-key BAGUA_TOKEN BAGUA_JOB_SECRET NGC_CLI_API_KEY NVIDIA_API_KEY CLIENT_SECRETS
    MY_CREDENTIALS authToken KEY PRIVATE_KEY SIGNING_KEYS kaggle.key MINIO_ROOT_PASSWORD TOKEN PASSWORD
""".split()
FRIENDS = """
    TOKENIZERS_PARALLELISM MAX_TOKENS MAX_TOKEN NUM_TOKENS PAD_TOKEN EOS_TOKEN BAGUA_TOKEN_FILE KEYBOARD_LAYOUT MONKEY
    SORT_KEY PRIMARY_KEY PUBLIC_KEY CACHE_KEY KEY_SIZE TOKEN_COUNT PASSWORD_FILE PWD OLDPWD SSH_AUTH_SOCK PATH HOME
    SECRETARY KEYWORDS TOKEN_URL PASSAGE COMPASS PATTERN SLURM_JOB_ID GOOGLE_APPLICATION_CREDENTIALS_PATH LR
""".split()


@pytest.mark.parametrize("name", SECRETS)
def test_names_that_look_like_secrets(name):
    assert looks_secret(name)


@pytest.mark.parametrize("name", FRIENDS)
def test_false_friends(name):
    assert not looks_secret(name)


def test_a_password_in_a_url_is_a_secret_too():
    assert looks_secret("http_proxy", "http://me:s3cret@proxy:3128") and looks_secret("DB", "postgres://u:p@h/d")
    for value in ("http://proxy:3128", "http://me@proxy:3128", "a:b@c", "https://h/a:b@c", ""):
        assert not looks_secret("http_proxy", value)
    variables = {"HF_TOKEN": "s3cret", "DB": "postgres://u:s3cret@h/d", "LR": "0.1"}
    assert shown(variables) == {"HF_TOKEN": "***", "DB": "***", "LR": "0.1"} and variables["HF_TOKEN"] == "s3cret"


USUAL = {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "TZ": "UTC"}
USUAL |= {"BAGUA_ALGORITHM": "bytegrad", "BAGUA_TOKEN_FILE": "/t", "PYTHONPATH": "/p", "http_proxy": "http://p:1"}
SECRET = {"VAULT_TOKEN": "v", "DATABASE_URL": "x", "BAGUA_TOKEN": "t", "BAGUA_JOB_SECRET": "s", "SLURM_JWT": "j"}
SECRET |= {"NVIDIA_API_KEY": "k", "https_proxy": "http://u:s3cret@p:1", "SSH_AUTH_SOCK": "/a"}
SECRET |= {"BAGUA_COORDINATOR_DATABASE_URL": "postgresql://h/d"}


def test_the_usual_variables_reach_ranks_and_the_operators_secrets_do_not():
    assert passed_on(USUAL | SECRET) == USUAL


def test_what_is_named_is_passed_on_too():
    assert passed_on(USUAL | SECRET, ("DATABASE_*", "SLURM_JWT")) == {**USUAL, "DATABASE_URL": "x", "SLURM_JWT": "j"}


def test_everything_is_everything_but_the_credentials_of_the_service():
    own = {"BAGUA_TOKEN", "BAGUA_JOB_SECRET", "BAGUA_COORDINATOR_DATABASE_URL"}
    assert (USUAL | SECRET).keys() - passed_on(USUAL | SECRET, ("*",)).keys() == own
    assert passed_on(SECRET, ("*", "BAGUA_TOKEN"))["BAGUA_TOKEN"] == "t", "named in full, on purpose"
