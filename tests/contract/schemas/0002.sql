-- Made by the coordinator of commit c42d81d: jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0002');
CREATE TABLE events (
	job_id VARCHAR(64) NOT NULL, 
	seq INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	reason TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (job_id, seq), 
	CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES('job-fb2f18300f',1,1.79562711449613666538e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-fb2f18300f',2,1.79562711453374028208e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-fb2f18300f',3,1.79562711460162043571e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-fb2f18300f',4,1.79562711460162043571e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-fb2f18300f',5,1.79562711460763692857e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-fb2f18300f',6,1.79562711461143946654e+09,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO "events" VALUES('job-fb2f18300f',7,1.79562711461143946654e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-fb2f18300f',8,1.79562711461773395543e+09,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-fb2f18300f',9,1.79562711462111496921e+09,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',1,1.79562711466656374928e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-24ba6d95c8',2,1.79562711466974687579e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',3,1.79562711468732476229e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',4,1.79562711468732476229e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',5,1.79562711469442772864e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',6,1.79562711474563455578e+09,'cancel_requested','cancelled',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',7,1.79562711476176261899e+09,'state','STOPPING: cancelled',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',8,1.79562711478483438493e+09,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',9,1.79562711478483438493e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-24ba6d95c8',10,1.79562711480516266817e+09,'state','CANCELLED: cancelled',1);
INSERT INTO "events" VALUES('job-5543b8a3b0',1,1.79562711487368035319e+09,'submitted','2 x 2 ranks',0);
INSERT INTO "events" VALUES('job-5543b8a3b0',2,1.79562711490162515643e+09,'placed','placed on node-0000, node-0001',1);
INSERT INTO "events" VALUES('job-5543b8a3b0',3,1.79562711498596429826e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-5543b8a3b0',4,1.79562711498596429826e+09,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-5543b8a3b0',5,1.79562711500385308264e+09,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO "events" VALUES('job-5543b8a3b0',6,1.79562711500385308264e+09,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO "events" VALUES('job-5543b8a3b0',7,1.79562711501223278044e+09,'state','RUNNING: all 4 ranks started',1);
INSERT INTO "events" VALUES('job-7c1ebe0f6f',1,1.79562711508166193957e+09,'submitted','9 x 9 ranks',0);
INSERT INTO "events" VALUES('job-7c1ebe0f6f',2,1.79562711508987236019e+09,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
CREATE TABLE generations (
	job_id VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	members JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	reason TEXT NOT NULL, 
	CONSTRAINT pk_generations PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_generations_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "generations" VALUES('job-fb2f18300f',1,'[{"node_id": "node-0000", "first_rank": 0, "nranks": 1}]',1.79562711449613666538e+09,'placed on node-0000');
INSERT INTO "generations" VALUES('job-24ba6d95c8',1,'[{"node_id": "node-0000", "first_rank": 0, "nranks": 1}]',1.79562711466656374928e+09,'placed on node-0000');
INSERT INTO "generations" VALUES('job-5543b8a3b0',1,'[{"node_id": "node-0000", "first_rank": 0, "nranks": 2}, {"node_id": "node-0001", "first_rank": 2, "nranks": 2}]',1.79562711487368035319e+09,'placed on node-0000, node-0001');
CREATE TABLE job_hosts (
	job_id VARCHAR(64) NOT NULL, 
	host_index INTEGER NOT NULL, 
	node_id VARCHAR(200) NOT NULL, 
	hostname VARCHAR(255) NOT NULL, 
	address VARCHAR(255) NOT NULL, 
	boot_id VARCHAR(200) NOT NULL, 
	first_rank INTEGER NOT NULL, 
	nranks INTEGER NOT NULL, 
	phase INTEGER NOT NULL, 
	engine_address TEXT NOT NULL, 
	error TEXT NOT NULL, 
	error_at FLOAT NOT NULL, 
	waiting TEXT NOT NULL, 
	CONSTRAINT pk_job_hosts PRIMARY KEY (job_id, host_index), 
	CONSTRAINT fk_job_hosts_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_hosts" VALUES('job-fb2f18300f',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'');
INSERT INTO "job_hosts" VALUES('job-24ba6d95c8',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'');
INSERT INTO "job_hosts" VALUES('job-5543b8a3b0',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'');
INSERT INTO "job_hosts" VALUES('job-5543b8a3b0',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'');
CREATE TABLE job_ranks (
	job_id VARCHAR(64) NOT NULL, 
	rank INTEGER NOT NULL, 
	local_rank INTEGER NOT NULL, 
	node_id VARCHAR(200) NOT NULL, 
	state INTEGER NOT NULL, 
	pid INTEGER NOT NULL, 
	exit_code INTEGER NOT NULL, 
	signal INTEGER NOT NULL, 
	error_tail TEXT NOT NULL, 
	log_path TEXT NOT NULL, 
	exited_at FLOAT NOT NULL, 
	seen_exited_at FLOAT NOT NULL, 
	CONSTRAINT pk_job_ranks PRIMARY KEY (job_id, rank), 
	CONSTRAINT fk_job_ranks_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_ranks" VALUES('job-fb2f18300f',0,0,'node-0000',3,1000,0,0,'','/var/lib/bagua/node/jobs/job-fb2f18300f/rank-0.log',1.79562711458025860786e+09,1.79562711461143946654e+09);
INSERT INTO "job_ranks" VALUES('job-24ba6d95c8',0,0,'node-0000',3,1000,-15,15,'','/var/lib/bagua/node/jobs/job-24ba6d95c8/rank-0.log',1.79562711476903986932e+09,1.79562711478483438493e+09);
INSERT INTO "job_ranks" VALUES('job-5543b8a3b0',0,0,'node-0000',2,1000,0,0,'','/var/lib/bagua/node/jobs/job-5543b8a3b0/rank-0.log',0.0,0.0);
INSERT INTO "job_ranks" VALUES('job-5543b8a3b0',1,1,'node-0000',2,1001,0,0,'','/var/lib/bagua/node/jobs/job-5543b8a3b0/rank-1.log',0.0,0.0);
INSERT INTO "job_ranks" VALUES('job-5543b8a3b0',2,0,'node-0001',2,1002,0,0,'','/var/lib/bagua/node/jobs/job-5543b8a3b0/rank-2.log',0.0,0.0);
INSERT INTO "job_ranks" VALUES('job-5543b8a3b0',3,1,'node-0001',2,1003,0,0,'','/var/lib/bagua/node/jobs/job-5543b8a3b0/rank-3.log',0.0,0.0);
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_specs" VALUES('job-fb2f18300f',X'0A05656E64656412092F62696E2F7472756520014001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-24ba6d95c8',X'0A0963616E63656C6C65641205747261696E200132060A01411201624001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-5543b8a3b0',X'0A0772756E6E696E671205747261696E20014002480259000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-7c1ebe0f6f',X'0A0777616974696E671205747261696E20014009480959000000000018F54061000000000000F03F');
CREATE TABLE jobs (
	job_id VARCHAR(64) NOT NULL, 
	idempotency_key VARCHAR(200), 
	name VARCHAR(200) NOT NULL, 
	brief BLOB DEFAULT '' NOT NULL, 
	state INTEGER NOT NULL, 
	reason TEXT NOT NULL, 
	outcome INTEGER, 
	cancel_reason TEXT, 
	generation INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT NOT NULL, 
	stopping_at FLOAT NOT NULL, 
	finished_at FLOAT NOT NULL, 
	master_addr VARCHAR(255) NOT NULL, 
	master_port INTEGER NOT NULL, 
	job_key BLOB NOT NULL, 
	last_event INTEGER NOT NULL, 
	revision INTEGER NOT NULL, 
	lease_owner VARCHAR(64), 
	lease_expires_at FLOAT NOT NULL, 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "jobs" VALUES('job-fb2f18300f','a key','ended',X'0A05656E64656412092F62696E2F74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1.79562711449613666538e+09,1.79562711460763692857e+09,1.79562711461773395543e+09,1.79562711462111496921e+09,'127.0.0.1',25778,X'1B4FC8DF54E0406E1EFB6CDF3490A97842E917E59EDF308DEE49F019B236CC43',9,9,NULL,0.0);
INSERT INTO "jobs" VALUES('job-24ba6d95c8',NULL,'cancelled',X'0A0963616E63656C6C65641205747261696E200140014801',7,'cancelled',7,'cancelled',1,1.79562711466656374928e+09,1.79562711469442772864e+09,1.79562711476176261899e+09,1.79562711480516266817e+09,'127.0.0.1',23684,X'D1678A11BF203DCF143A31824AA72CD69D3786856C620DE0D7ED1C5B3E2697B5',10,10,NULL,0.0);
INSERT INTO "jobs" VALUES('job-5543b8a3b0',NULL,'running',X'0A0772756E6E696E671205747261696E200140024802',3,'all 4 ranks started',NULL,NULL,1,1.79562711487368035319e+09,1.79562711501223278044e+09,0.0,0.0,'127.0.0.1',23682,X'D01D00AFA34B7B9CA6099EB1B285C687D7B5A08E7AE99910F7444EED9743C613',7,8,'coordinator-e7f428c17139b567',1.79562712501470279694e+09);
INSERT INTO "jobs" VALUES('job-7c1ebe0f6f',NULL,'waiting',X'0A0777616974696E671205747261696E200140094809',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1.79562711508166193957e+09,0.0,0.0,0.0,'',24693,X'560F8193E72340CF1670D6D5AE5EFA067EBCE9D36EF98169683A6933961CC306',2,3,'coordinator-e7f428c17139b567',1.79562712508987236022e+09);
CREATE TABLE nodes (
	node_id VARCHAR(200) NOT NULL, 
	hostname VARCHAR(255) NOT NULL, 
	address VARCHAR(255) NOT NULL, 
	slots INTEGER NOT NULL, 
	version VARCHAR(64) NOT NULL, 
	boot_id VARCHAR(200) NOT NULL, 
	last_seen FLOAT NOT NULL, 
	owner VARCHAR(64), 
	CONSTRAINT pk_nodes PRIMARY KEY (node_id)
);
INSERT INTO "nodes" VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1.79562711585834217076e+09,'coordinator-e7f428c17139b567');
INSERT INTO "nodes" VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1.79562711585834217076e+09,'coordinator-e7f428c17139b567');
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
COMMIT;
