"""The database: models, queries, migrations, the writer's thread."""
