import * as grpc from '@grpc/grpc-js';

export { grpc };
export const credentials: typeof grpc.credentials;
/** Directory that has pagewire/v1/*.proto. */
export const protoDir: string;
export const InferenceService: grpc.ServiceClientConstructor;
export const AdminService: grpc.ServiceClientConstructor;
