-- Made by the coordinator of commit 24886e6: tokens, and jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
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
	finished_at FLOAT NOT NULL, 
	submitted_clock FLOAT NOT NULL, 
	placed_clock FLOAT NOT NULL, 
	stopping_clock FLOAT NOT NULL, 
	stalls INTEGER DEFAULT '0' NOT NULL, 
	"plan" INTEGER DEFAULT '0' NOT NULL, 
	wanted_nodes INTEGER DEFAULT '0' NOT NULL, 
	paused BOOLEAN DEFAULT 0 NOT NULL, 
	next_member INTEGER DEFAULT '0' NOT NULL, 
	failures INTEGER DEFAULT '0' NOT NULL, 
	retry_clock FLOAT DEFAULT '0' NOT NULL, 
	respawns TEXT DEFAULT '' NOT NULL, 
	master_addr VARCHAR(255) NOT NULL, 
	master_port INTEGER NOT NULL, 
	job_key BLOB NOT NULL, 
	last_event INTEGER NOT NULL, 
	revision INTEGER NOT NULL, 
	lease_owner VARCHAR(64), 
	namespace VARCHAR(64) DEFAULT 'default' NOT NULL, 
	submitted_by VARCHAR(200) DEFAULT '' NOT NULL, 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO jobs VALUES('job-1744847073',NULL,'ended',X'0a05656e64656412092f62696e2f74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1795637040.6501300334,0.0,1795637040.7750725745,2.5492850450027617625,2.5662553420006588567,2.6742237560029025189,0,0,0,0,1,0,0.0,'','127.0.0.1',31759,X'12110271f727fa0b67f334160d09d77bd6b8d1884e751a0f976f15da2eff8849',8,4,'coordinator-9812191bd906fd60','default','administrator');
INSERT INTO jobs VALUES('job-1cabf88252',NULL,'cancelled',X'0a0963616e63656c6c65641205747261696e200140014801',7,'cancelled',7,'cancelled',1,1795637040.8060185908,1795637040.8862235546,1795637040.9923548698,2.7051740750030148774,2.7360377550030534621,2.8356325250024383421,0,0,0,0,1,0,0.0,'','127.0.0.1',31612,X'01db4281e779272c81f9fe649bfb40b90831a1fc600d0b4be9430e4bcf7ad07e',10,6,'coordinator-9812191bd906fd60','vision','ann');
INSERT INTO jobs VALUES('job-aa491e1881',NULL,'running',X'0a0772756e6e696e671205747261696e200140024802',3,'all 4 ranks started',NULL,NULL,1,1795637041.062116146,1795637041.1699550151,0.0,2.9612708120039314962,2.9821313760039629414,0.0,0,0,0,0,4,0,0.0,'','127.0.0.1',26811,X'ea88332fb2b5fbe22d3756891fda86c22c3cdd277ce39a0944485765e0af1b39',7,4,'coordinator-9812191bd906fd60','vision','ann');
INSERT INTO jobs VALUES('job-30fca33ca7',NULL,'waiting',X'0a0777616974696e671205747261696e200140094809',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1795637041.2620627879,0.0,0.0,3.1612178840005071833,0.0,0.0,0,0,0,0,0,0,0.0,'','',31390,X'39e244fc4a8b6cfbad645370fb9424e80343d700cbc547d201ad08e3e895dbd5',2,2,'coordinator-9812191bd906fd60','default','administrator');
CREATE TABLE nodes (
	node_id VARCHAR(200) NOT NULL, 
	hostname VARCHAR(255) NOT NULL, 
	address VARCHAR(255) NOT NULL, 
	slots INTEGER NOT NULL, 
	version VARCHAR(64) NOT NULL, 
	boot_id VARCHAR(200) NOT NULL, 
	last_seen FLOAT NOT NULL, 
	owner VARCHAR(64), 
	draining BOOLEAN DEFAULT 0 NOT NULL, 
	leaving BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_nodes PRIMARY KEY (node_id)
);
INSERT INTO nodes VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1795637040.5013599395,'coordinator-9812191bd906fd60',0,0);
INSERT INTO nodes VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1795637040.5076839923,'coordinator-9812191bd906fd60',0,0);
CREATE TABLE code_archives (
	digest VARCHAR(64) NOT NULL, 
	bytes INTEGER NOT NULL, 
	complete BOOLEAN NOT NULL, 
	used_at FLOAT NOT NULL, 
	CONSTRAINT pk_code_archives PRIMARY KEY (digest)
);
CREATE TABLE coordinators (
	owner VARCHAR(64) NOT NULL, 
	clock FLOAT NOT NULL, 
	CONSTRAINT pk_coordinators PRIMARY KEY (owner)
);
INSERT INTO coordinators VALUES('coordinator-9812191bd906fd60',3.1755011340028431732);
CREATE TABLE tune_studies (
	study_id VARCHAR(64) NOT NULL, 
	study BLOB NOT NULL, 
	settled BOOLEAN NOT NULL, 
	best TEXT NOT NULL, 
	line TEXT NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	updated_at FLOAT NOT NULL, 
	namespace VARCHAR(64) DEFAULT 'default' NOT NULL, 
	CONSTRAINT pk_tune_studies PRIMARY KEY (study_id)
);
CREATE TABLE tokens (
	token_id VARCHAR(64) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	created_at FLOAT NOT NULL, 
	created_by VARCHAR(200) NOT NULL, 
	expires_at FLOAT NOT NULL, 
	revoked_at FLOAT NOT NULL, 
	CONSTRAINT pk_tokens PRIMARY KEY (token_id)
);
INSERT INTO tokens VALUES('524713f1','ann','submit','vision','d5c4a668e6d104a8eff6de969846f0bfbed38bd80b7c3ddde29407cc9e3d3e6c',1795637040.5418462753,'administrator',2110997040.5418462752,0.0);
INSERT INTO tokens VALUES('f9da60af','host-7','node','*','6654711c358a82408264090c44d843ccc814069bbe7342eeb65fb86b51c1a9e0',1795637040.5619060993,'administrator',0.0,0.0);
INSERT INTO tokens VALUES('9acb8e20','eve','read','*','702684d53b97a2892323757a886654258b8c8b682a1d996a595403e3d99449e6',1795637040.5762360095,'administrator',0.0,1795637040.6105904578);
CREATE TABLE audit (
	seq INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	who VARCHAR(200) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	method VARCHAR(100) NOT NULL, 
	target VARCHAR(200) NOT NULL, 
	outcome VARCHAR(40) NOT NULL, 
	detail TEXT NOT NULL, 
	peer VARCHAR(200) NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (seq)
);
INSERT INTO audit VALUES(1,1795637040.5543777942,'administrator','admin','*','AccountService/CreateToken','524713f1','OK','','ipv4:127.0.0.1:51708');
INSERT INTO audit VALUES(2,1795637040.5740046501,'administrator','admin','*','AccountService/CreateToken','f9da60af','OK','','ipv4:127.0.0.1:51708');
INSERT INTO audit VALUES(3,1795637040.5931947231,'administrator','admin','*','AccountService/CreateToken','9acb8e20','OK','','ipv4:127.0.0.1:51708');
INSERT INTO audit VALUES(4,1795637040.6296021938,'administrator','admin','*','AccountService/RevokeToken','eve','OK','','ipv4:127.0.0.1:51708');
INSERT INTO audit VALUES(5,1795637040.6676824092,'administrator','admin','*','JobService/SubmitJob','job-1744847073','OK','','ipv4:127.0.0.1:51708');
INSERT INTO audit VALUES(6,1795637040.837768793,'ann','submit','vision','JobService/SubmitJob','job-1cabf88252','OK','','ipv4:127.0.0.1:51710');
INSERT INTO audit VALUES(7,1795637040.9846847057,'ann','submit','vision','JobService/CancelJob','job-1cabf88252','OK','','ipv4:127.0.0.1:51710');
INSERT INTO audit VALUES(8,1795637041.0837352275,'ann','submit','vision','JobService/SubmitJob','job-aa491e1881','OK','','ipv4:127.0.0.1:51710');
INSERT INTO audit VALUES(9,1795637041.2766921519,'administrator','admin','*','JobService/SubmitJob','job-30fca33ca7','OK','','ipv4:127.0.0.1:51708');
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO job_specs VALUES('job-1744847073',X'0a05656e64656412092f62696e2f7472756520014001480159000000000020ac40');
INSERT INTO job_specs VALUES('job-1cabf88252',X'0a0963616e63656c6c65641205747261696e200132060a014112016240014801');
INSERT INTO job_specs VALUES('job-aa491e1881',X'0a0772756e6e696e671205747261696e200140024802');
INSERT INTO job_specs VALUES('job-30fca33ca7',X'0a0777616974696e671205747261696e20014009480959000000000020ac40');
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
	error_clock FLOAT NOT NULL, 
	waiting TEXT NOT NULL, 
	suspended TEXT DEFAULT '' NOT NULL, 
	suspended_clock FLOAT DEFAULT '0' NOT NULL, 
	lost_hosts TEXT DEFAULT '' NOT NULL, 
	withdrawn BOOLEAN DEFAULT 0 NOT NULL, 
	last_generation INTEGER DEFAULT '0' NOT NULL, 
	entered INTEGER DEFAULT '0' NOT NULL, 
	takes_newcomers BOOLEAN DEFAULT 0 NOT NULL, 
	joining BOOLEAN DEFAULT 0 NOT NULL, 
	dismissed BOOLEAN DEFAULT 0 NOT NULL, 
	since_clock FLOAT DEFAULT '0' NOT NULL, 
	ranks TEXT NOT NULL, 
	CONSTRAINT pk_job_hosts PRIMARY KEY (job_id, host_index), 
	CONSTRAINT fk_job_hosts_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO job_hosts VALUES('job-1744847073',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,0,0,"","/var/lib/bagua/node/jobs/job-1744847073/rank-0.log",1795637040.7095075,2.6742237560029025,false,-1,false,false,false]]');
INSERT INTO job_hosts VALUES('job-1cabf88252',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,-15,15,"","/var/lib/bagua/node/jobs/job-1cabf88252/rank-0.log",1795637040.9846625,2.891505360003066,false,-1,false,false,false]]');
INSERT INTO job_hosts VALUES('job-aa491e1881',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1000,0,0,"","/var/lib/bagua/node/jobs/job-aa491e1881/rank-0.log",0.0,0.0,false,-1,false,false,false],[2,1001,0,0,"","/var/lib/bagua/node/jobs/job-aa491e1881/rank-1.log",0.0,0.0,false,-1,false,false,false]]');
INSERT INTO job_hosts VALUES('job-aa491e1881',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1002,0,0,"","/var/lib/bagua/node/jobs/job-aa491e1881/rank-2.log",0.0,0.0,false,-1,false,false,false],[2,1003,0,0,"","/var/lib/bagua/node/jobs/job-aa491e1881/rank-3.log",0.0,0.0,false,-1,false,false,false]]');
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
INSERT INTO events VALUES('job-1744847073',1,1795637040.6501300334,'submitted','1 x 1 ranks',0);
INSERT INTO events VALUES('job-1744847073',2,1795637040.6671037674,'placed','placed on node-0000',1);
INSERT INTO events VALUES('job-1744847073',3,1795637040.7750725745,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO events VALUES('job-1744847073',4,1795637040.7750725745,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO events VALUES('job-1744847073',5,1795637040.7750725745,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO events VALUES('job-1744847073',6,1795637040.7750725745,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO events VALUES('job-1744847073',7,1795637040.7750725745,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO events VALUES('job-1744847073',8,1795637040.7750725745,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO events VALUES('job-1cabf88252',1,1795637040.8060185908,'submitted','1 x 1 ranks',0);
INSERT INTO events VALUES('job-1cabf88252',2,1795637040.8368868827,'placed','placed on node-0000',1);
INSERT INTO events VALUES('job-1cabf88252',3,1795637040.8862235546,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO events VALUES('job-1cabf88252',4,1795637040.8862235546,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO events VALUES('job-1cabf88252',5,1795637040.8862235546,'state','RUNNING: 1 rank started',1);
INSERT INTO events VALUES('job-1cabf88252',6,1795637040.9364826679,'cancel_requested','cancelled',1);
INSERT INTO events VALUES('job-1cabf88252',7,1795637040.9364826679,'state','STOPPING: cancelled',1);
INSERT INTO events VALUES('job-1cabf88252',8,1795637040.9923548698,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO events VALUES('job-1cabf88252',9,1795637040.9923548698,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO events VALUES('job-1cabf88252',10,1795637040.9923548698,'state','CANCELLED: cancelled',1);
INSERT INTO events VALUES('job-aa491e1881',1,1795637041.062116146,'submitted','2 x 2 ranks',0);
INSERT INTO events VALUES('job-aa491e1881',2,1795637041.0829808712,'placed','placed on node-0000, node-0001',1);
INSERT INTO events VALUES('job-aa491e1881',3,1795637041.1699550151,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO events VALUES('job-aa491e1881',4,1795637041.1699550151,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO events VALUES('job-aa491e1881',5,1795637041.1699550151,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO events VALUES('job-aa491e1881',6,1795637041.1699550151,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO events VALUES('job-aa491e1881',7,1795637041.1699550151,'state','RUNNING: all 4 ranks started',1);
INSERT INTO events VALUES('job-30fca33ca7',1,1795637041.2620627879,'submitted','9 x 9 ranks',0);
INSERT INTO events VALUES('job-30fca33ca7',2,1795637041.2762050628,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
CREATE TABLE code_pieces (
	digest VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	data BLOB NOT NULL, 
	CONSTRAINT pk_code_pieces PRIMARY KEY (digest, number), 
	CONSTRAINT fk_code_pieces_digest FOREIGN KEY(digest) REFERENCES code_archives (digest) ON DELETE CASCADE
);
CREATE TABLE code_grants (
	digest VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_code_grants PRIMARY KEY (digest, namespace), 
	CONSTRAINT fk_code_grants_digest FOREIGN KEY(digest) REFERENCES code_archives (digest) ON DELETE CASCADE
);
CREATE TABLE job_code (
	job_id VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_job_code PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_code_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE tune_trials (
	study_id VARCHAR(64) NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	trial BLOB NOT NULL, 
	CONSTRAINT pk_tune_trials PRIMARY KEY (study_id, job_id, number), 
	CONSTRAINT fk_tune_trials_study_id FOREIGN KEY(study_id) REFERENCES tune_studies (study_id) ON DELETE CASCADE
);
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO alembic_version VALUES('0008');
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_jobs_namespace_created_at_job_id ON jobs (namespace, created_at, job_id);
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_tune_studies_job_id ON tune_studies (job_id);
CREATE INDEX ix_audit_time ON audit (time);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
CREATE INDEX ix_job_code_digest ON job_code (digest);
COMMIT;
