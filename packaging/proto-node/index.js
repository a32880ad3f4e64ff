// const { InferenceService, credentials } = require('pagewire-proto');
// const client = new InferenceService('localhost:50051', credentials.createInsecure());
const fs = require('fs');
const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const protoDir = path.join(__dirname, 'protos');
const files = fs.readdirSync(path.join(protoDir, 'pagewire', 'v1')).map((name) => `pagewire/v1/${name}`);
const definition = loader.loadSync(files, { includeDirs: [protoDir], defaults: true, oneofs: true });

module.exports = { ...grpc.loadPackageDefinition(definition).pagewire.v1, credentials: grpc.credentials, grpc, protoDir };
