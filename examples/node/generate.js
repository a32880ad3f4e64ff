// Stream a completion straight from the protos. Usage: node generate.js [HOST:PORT] [generate | cancel | deadline | error]
//   cancel     ends the stream after the first text
//   deadline   gives the request 20 ms
//   error      asks for an impossible temperature and shows the error's details
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');
const path = require('path');
const [target = '127.0.0.1:50051', mode = 'generate'] = process.argv.slice(2);
const protos = path.join(__dirname, '..', '..', 'protos');
const definition = loader.loadSync('pagewire/v1/inference.proto', { includeDirs: [protos], defaults: true });
const { InferenceService } = grpc.loadPackageDefinition(definition).pagewire.v1;
const client = new InferenceService(target, grpc.credentials.createInsecure());
const long = mode !== 'generate';
const sampling = { maxTokens: long ? 200 : 16, temperature: mode === 'error' ? -1 : 0, ignoreEos: long };
const options = mode === 'deadline' ? { deadline: Date.now() + 20 } : {};
const call = client.Generate({ text: 'The capital of France is', sampling }, new grpc.Metadata(), options);
call.on('data', (message) => {
  process.stdout.write(message.text);
  if (mode === 'cancel' && message.text) call.cancel();
});
call.on('error', (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  for (const bytes of error.metadata.get('grpc-status-details-bin')) showDetails(bytes);
  process.exitCode = 1;
  client.close();
});
call.on('end', () => { process.stdout.write('\n'); client.close(); });

function showDetails(bytes) {
  const rpc = protobuf.loadSync(path.join(__dirname, '..', 'cpp', 'error_details.proto'));
  const [Status, BadRequest] = ['google.rpc.Status', 'google.rpc.BadRequest'].map((name) => rpc.lookupType(name));
  for (const { type_url: type, value } of Status.decode(bytes).details) {
    if (!type.endsWith('/google.rpc.BadRequest')) continue;
    for (const { field, description } of BadRequest.decode(value).fieldViolations) console.error(`${field}: ${description}`);
  }
}
