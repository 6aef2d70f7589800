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
INSERT INTO jobs VALUES('job-5a92f084a7',NULL,'ended',X'0a05656e64656412092f62696e2f74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1795635468.4541900157,0.0,1795635468.5824885367,2.5451993850001599639,2.5702491700030805077,2.673492465000890661,0,0,0,0,1,0,0.0,'','127.0.0.1',31360,X'e59132608778cb54fbf0e0e328ad508a9079585bb39ca0b66ff123e2297f2030',8,4,'coordinator-03527a6b37e271b5','default','administrator');
INSERT INTO jobs VALUES('job-e9cd3c19fa',NULL,'cancelled',X'0a0963616e63656c6c65641205747261696e200140014801',7,'cancelled',7,'cancelled',1,1795635468.6302511691,1795635468.6980924607,1795635468.7812619209,2.721259473000827711,2.7444542730008834041,2.8370893069986777845,0,0,0,0,1,0,0.0,'','127.0.0.1',25338,X'665d46fb039d677007057ee2e717ddcf97d8331e869c1029a52603ff96df335e',10,6,'coordinator-03527a6b37e271b5','vision','ann');
INSERT INTO jobs VALUES('job-adc50f67ad',NULL,'running',X'0a0772756e6e696e671205747261696e200140024802',3,'all 4 ranks started',NULL,NULL,1,1795635468.870212078,1795635468.9314963817,0.0,2.9612192909989971667,2.9768594800007122103,0.0,0,0,0,0,4,0,0.0,'','127.0.0.1',22820,X'7ad0c67aa6a833e5b1c0bfc5a86d487e24d9b0d59620969028e9645f15f6b6da',7,4,'coordinator-03527a6b37e271b5','vision','ann');
INSERT INTO jobs VALUES('job-f002fec665',NULL,'waiting',X'0a0777616974696e671205747261696e200140094809',6,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1795635468.9862442016,0.0,1795635469.0100829601,3.0772520060017996001,0.0,0.0,0,0,0,0,0,0,0.0,'','',21789,X'39b41c6b72547a4eacde75358f0f17d086c5347386b6eac7429cbb6dc316e231',2,2,'coordinator-03527a6b37e271b5','default','administrator');
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
INSERT INTO nodes VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1795635468.3380854129,'coordinator-03527a6b37e271b5',0,0);
INSERT INTO nodes VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1795635468.354417324,'coordinator-03527a6b37e271b5',0,0);
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
INSERT INTO coordinators VALUES('coordinator-03527a6b37e271b5',3.1013001079991227015);
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
INSERT INTO tokens VALUES('03708fc3','ann','submit','vision','88a3dc280804d487918df7ca29394b4a9449bcaca33665dc77fc8bbae95a1651',1795635468.3846852779,'administrator',2110995468.3846852778,0.0);
INSERT INTO tokens VALUES('1d91eaf4','host-7','node','*','2e817e3378fd964ddfb127c326d663e2698d6b72a3ae11e783c7aabc1767e0b3',1795635468.3989152908,'administrator',0.0,0.0);
INSERT INTO tokens VALUES('c3f4b087','eve','read','*','ff5496125b07c932c8ec4a1fd38abb05a8193372b43c4e78f55ebab39b2ff055',1795635468.4232413768,'administrator',0.0,1795635468.4339711665);
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
INSERT INTO audit VALUES(1,1795635468.3966255187,'administrator','admin','*','AccountService/CreateToken','03708fc3','OK','','ipv4:127.0.0.1:43526');
INSERT INTO audit VALUES(2,1795635468.4143953324,'administrator','admin','*','AccountService/CreateToken','1d91eaf4','OK','','ipv4:127.0.0.1:43526');
INSERT INTO audit VALUES(3,1795635468.4314553738,'administrator','admin','*','AccountService/CreateToken','c3f4b087','OK','','ipv4:127.0.0.1:43526');
INSERT INTO audit VALUES(4,1795635468.4441902637,'administrator','admin','*','AccountService/RevokeToken','eve','OK','','ipv4:127.0.0.1:43526');
INSERT INTO audit VALUES(5,1795635468.4798722267,'administrator','admin','*','JobService/SubmitJob','job-5a92f084a7','OK','','ipv4:127.0.0.1:43526');
INSERT INTO audit VALUES(6,1795635468.6542723178,'ann','submit','vision','JobService/SubmitJob','job-e9cd3c19fa','OK','','ipv4:127.0.0.1:43538');
INSERT INTO audit VALUES(7,1795635468.7683370113,'ann','submit','vision','JobService/CancelJob','job-e9cd3c19fa','OK','','ipv4:127.0.0.1:43538');
INSERT INTO audit VALUES(8,1795635468.8864393234,'ann','submit','vision','JobService/SubmitJob','job-adc50f67ad','OK','','ipv4:127.0.0.1:43538');
INSERT INTO audit VALUES(9,1795635469.0107445716,'administrator','admin','*','JobService/SubmitJob','job-f002fec665','OK','','ipv4:127.0.0.1:43526');
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO job_specs VALUES('job-5a92f084a7',X'0a05656e64656412092f62696e2f74727565200140014801');
INSERT INTO job_specs VALUES('job-e9cd3c19fa',X'0a0963616e63656c6c65641205747261696e200132060a014112016240014801');
INSERT INTO job_specs VALUES('job-adc50f67ad',X'0a0772756e6e696e671205747261696e200140024802');
INSERT INTO job_specs VALUES('job-f002fec665',X'0a0777616974696e671205747261696e200140094809');
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
INSERT INTO job_hosts VALUES('job-5a92f084a7',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,0,0,"","/var/lib/bagua/node/jobs/job-5a92f084a7/rank-0.log",1795635468.53783,2.6734924650008907,false,-1,false,false,false]]');
INSERT INTO job_hosts VALUES('job-e9cd3c19fa',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,-15,15,"","/var/lib/bagua/node/jobs/job-e9cd3c19fa/rank-0.log",1795635468.7700334,2.8722646130008798,false,-1,false,false,false]]');
INSERT INTO job_hosts VALUES('job-adc50f67ad',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1000,0,0,"","/var/lib/bagua/node/jobs/job-adc50f67ad/rank-0.log",0.0,0.0,false,-1,false,false,false],[2,1001,0,0,"","/var/lib/bagua/node/jobs/job-adc50f67ad/rank-1.log",0.0,0.0,false,-1,false,false,false]]');
INSERT INTO job_hosts VALUES('job-adc50f67ad',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1002,0,0,"","/var/lib/bagua/node/jobs/job-adc50f67ad/rank-2.log",0.0,0.0,false,-1,false,false,false],[2,1003,0,0,"","/var/lib/bagua/node/jobs/job-adc50f67ad/rank-3.log",0.0,0.0,false,-1,false,false,false]]');
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
INSERT INTO events VALUES('job-5a92f084a7',1,1795635468.4541900157,'submitted','1 x 1 ranks',0);
INSERT INTO events VALUES('job-5a92f084a7',2,1795635468.4792437553,'placed','placed on node-0000',1);
INSERT INTO events VALUES('job-5a92f084a7',3,1795635468.5824885367,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO events VALUES('job-5a92f084a7',4,1795635468.5824885367,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO events VALUES('job-5a92f084a7',5,1795635468.5824885367,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO events VALUES('job-5a92f084a7',6,1795635468.5824885367,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO events VALUES('job-5a92f084a7',7,1795635468.5824885367,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO events VALUES('job-5a92f084a7',8,1795635468.5824885367,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO events VALUES('job-e9cd3c19fa',1,1795635468.6302511691,'submitted','1 x 1 ranks',0);
INSERT INTO events VALUES('job-e9cd3c19fa',2,1795635468.6534507274,'placed','placed on node-0000',1);
INSERT INTO events VALUES('job-e9cd3c19fa',3,1795635468.6980924607,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO events VALUES('job-e9cd3c19fa',4,1795635468.6980924607,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO events VALUES('job-e9cd3c19fa',5,1795635468.6980924607,'state','RUNNING: 1 rank started',1);
INSERT INTO events VALUES('job-e9cd3c19fa',6,1795635468.7460856437,'cancel_requested','cancelled',1);
INSERT INTO events VALUES('job-e9cd3c19fa',7,1795635468.7460856437,'state','STOPPING: cancelled',1);
INSERT INTO events VALUES('job-e9cd3c19fa',8,1795635468.7812619209,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO events VALUES('job-e9cd3c19fa',9,1795635468.7812619209,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO events VALUES('job-e9cd3c19fa',10,1795635468.7812619209,'state','CANCELLED: cancelled',1);
INSERT INTO events VALUES('job-adc50f67ad',1,1795635468.870212078,'submitted','2 x 2 ranks',0);
INSERT INTO events VALUES('job-adc50f67ad',2,1795635468.8858556747,'placed','placed on node-0000, node-0001',1);
INSERT INTO events VALUES('job-adc50f67ad',3,1795635468.9314963817,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO events VALUES('job-adc50f67ad',4,1795635468.9314963817,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO events VALUES('job-adc50f67ad',5,1795635468.9314963817,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO events VALUES('job-adc50f67ad',6,1795635468.9314963817,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO events VALUES('job-adc50f67ad',7,1795635468.9314963817,'state','RUNNING: all 4 ranks started',1);
INSERT INTO events VALUES('job-f002fec665',1,1795635468.9862442016,'submitted','9 x 9 ranks',0);
INSERT INTO events VALUES('job-f002fec665',2,1795635469.0100829601,'state','FAILED: needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
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
CREATE INDEX ix_jobs_namespace_created_at_job_id ON jobs (namespace, created_at, job_id);
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_tune_studies_job_id ON tune_studies (job_id);
CREATE INDEX ix_audit_time ON audit (time);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
CREATE INDEX ix_job_code_digest ON job_code (digest);
COMMIT;
