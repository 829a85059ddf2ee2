"""The wire types of dspark-cluster, generated from the .proto files beside them (`make protos`)."""
