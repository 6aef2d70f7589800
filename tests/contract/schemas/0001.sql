-- Made by the coordinator of commit f30a13d: jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0001');
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
INSERT INTO "events" VALUES('job-493a2a3f8a',1,1.79562663446163344382e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-493a2a3f8a',2,1.79562663446964597708e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-493a2a3f8a',3,1.79562663450139284133e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-493a2a3f8a',4,1.79562663450139284133e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-493a2a3f8a',5,1.79562663451363515847e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-493a2a3f8a',6,1.79562663451937532419e+09,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO "events" VALUES('job-493a2a3f8a',7,1.79562663451937532419e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-493a2a3f8a',8,1.79562663452566838263e+09,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-493a2a3f8a',9,1.79562663453460335735e+09,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-90272a2432',1,1.79562663454629325866e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-90272a2432',2,1.79562663454872107511e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-90272a2432',3,1.79562663458208894725e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-90272a2432',4,1.79562663458208894725e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-90272a2432',5,1.79562663459342908862e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-90272a2432',6,1.79562663462981915475e+09,'cancel_requested','cancelled',1);
INSERT INTO "events" VALUES('job-90272a2432',7,1.7956266346339435577e+09,'state','STOPPING: cancelled',1);
INSERT INTO "events" VALUES('job-90272a2432',8,1.79562663464507031446e+09,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO "events" VALUES('job-90272a2432',9,1.79562663464507031446e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-90272a2432',10,1.79562663464891672134e+09,'state','CANCELLED: cancelled',1);
INSERT INTO "events" VALUES('job-7d421d95d4',1,1.79562663471606731415e+09,'submitted','2 x 2 ranks',0);
INSERT INTO "events" VALUES('job-7d421d95d4',2,1.79562663472329521181e+09,'placed','placed on node-0000, node-0001',1);
INSERT INTO "events" VALUES('job-7d421d95d4',3,1.79562663478285098076e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-7d421d95d4',4,1.79562663478285098076e+09,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-7d421d95d4',5,1.79562663479001879693e+09,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO "events" VALUES('job-7d421d95d4',6,1.79562663479001879693e+09,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO "events" VALUES('job-7d421d95d4',7,1.79562663480953526497e+09,'state','RUNNING: all 4 ranks started',1);
INSERT INTO "events" VALUES('job-dc55ae6476',1,1.79562663486077833175e+09,'submitted','9 x 9 ranks',0);
INSERT INTO "events" VALUES('job-dc55ae6476',2,1.79562663486966395381e+09,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
CREATE TABLE generations (
	job_id VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	members JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	reason TEXT NOT NULL, 
	CONSTRAINT pk_generations PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_generations_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "generations" VALUES('job-493a2a3f8a',1,'[{"node_id": "node-0000", "first_rank": 0, "nranks": 1}]',1.79562663446163344382e+09,'placed on node-0000');
INSERT INTO "generations" VALUES('job-90272a2432',1,'[{"node_id": "node-0000", "first_rank": 0, "nranks": 1}]',1.79562663454629325866e+09,'placed on node-0000');
INSERT INTO "generations" VALUES('job-7d421d95d4',1,'[{"node_id": "node-0000", "first_rank": 0, "nranks": 2}, {"node_id": "node-0001", "first_rank": 2, "nranks": 2}]',1.79562663471606731415e+09,'placed on node-0000, node-0001');
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
INSERT INTO "job_hosts" VALUES('job-493a2a3f8a',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'');
INSERT INTO "job_hosts" VALUES('job-90272a2432',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'');
INSERT INTO "job_hosts" VALUES('job-7d421d95d4',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'');
INSERT INTO "job_hosts" VALUES('job-7d421d95d4',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'');
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
INSERT INTO "job_ranks" VALUES('job-493a2a3f8a',0,0,'node-0000',3,1000,0,0,'','/var/lib/bagua/node/jobs/job-493a2a3f8a/rank-0.log',1.79562663448617935175e+09,1.79562663451937532419e+09);
INSERT INTO "job_ranks" VALUES('job-90272a2432',0,0,'node-0000',3,1000,-15,15,'','/var/lib/bagua/node/jobs/job-90272a2432/rank-0.log',1.79562663463835453991e+09,1.79562663464507031446e+09);
INSERT INTO "job_ranks" VALUES('job-7d421d95d4',0,0,'node-0000',2,1000,0,0,'','/var/lib/bagua/node/jobs/job-7d421d95d4/rank-0.log',0.0,0.0);
INSERT INTO "job_ranks" VALUES('job-7d421d95d4',1,1,'node-0000',2,1001,0,0,'','/var/lib/bagua/node/jobs/job-7d421d95d4/rank-1.log',0.0,0.0);
INSERT INTO "job_ranks" VALUES('job-7d421d95d4',2,0,'node-0001',2,1002,0,0,'','/var/lib/bagua/node/jobs/job-7d421d95d4/rank-2.log',0.0,0.0);
INSERT INTO "job_ranks" VALUES('job-7d421d95d4',3,1,'node-0001',2,1003,0,0,'','/var/lib/bagua/node/jobs/job-7d421d95d4/rank-3.log',0.0,0.0);
CREATE TABLE jobs (
	job_id VARCHAR(64) NOT NULL, 
	idempotency_key VARCHAR(200), 
	name VARCHAR(200) NOT NULL, 
	spec BLOB NOT NULL, 
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
INSERT INTO "jobs" VALUES('job-493a2a3f8a','a key','ended',X'0A05656E64656412092F62696E2F7472756520014001480159000000000018F54061000000000000F03F',5,'1 rank ended with exit code 0',5,NULL,1,1.79562663446163344382e+09,1.79562663451363515847e+09,1.79562663452566838263e+09,1.79562663453460335735e+09,'127.0.0.1',29729,X'514625320A537B693034577CD0A2989F47FAC85A1E59B74B26B099C9126444F7',9,9,NULL,0.0);
INSERT INTO "jobs" VALUES('job-90272a2432',NULL,'cancelled',X'0A0963616E63656C6C65641205747261696E200132060A01411201624001480159000000000018F54061000000000000F03F',7,'cancelled',7,'cancelled',1,1.79562663454629325866e+09,1.79562663459342908862e+09,1.7956266346339435577e+09,1.79562663464891672134e+09,'127.0.0.1',22198,X'A26C0CB3410BF303A929557535C1BE8119CD229599212C323E222768877A44D9',10,10,NULL,0.0);
INSERT INTO "jobs" VALUES('job-7d421d95d4',NULL,'running',X'0A0772756E6E696E671205747261696E20014002480259000000000018F54061000000000000F03F',3,'all 4 ranks started',NULL,NULL,1,1.79562663471606731415e+09,1.79562663480953526497e+09,0.0,0.0,'127.0.0.1',29678,X'A8A32A3129A88CF62963E9D271D22EDA07AB8EACD6285326D148DF6F3A694D95',7,8,'coordinator-93cdcf8cafd28c24',1.7956266448299846649e+09);
INSERT INTO "jobs" VALUES('job-dc55ae6476',NULL,'waiting',X'0A0777616974696E671205747261696E20014009480959000000000018F54061000000000000F03F',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1.79562663486077833175e+09,0.0,0.0,0.0,'',24446,X'94FFBAFBC589D81A9FC734E5FB4728AAE5F7AD8444081219D43A8A04B0B522CC',2,3,'coordinator-93cdcf8cafd28c24',1.79562664486966395375e+09);
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
INSERT INTO "nodes" VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1.79562663441627836224e+09,'coordinator-93cdcf8cafd28c24');
INSERT INTO "nodes" VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1.7956266344245169163e+09,'coordinator-93cdcf8cafd28c24');
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
COMMIT;
